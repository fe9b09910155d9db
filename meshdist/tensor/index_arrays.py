"""Indexing by arrays: integer arrays, also along sharded dimensions, and masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.agreement import merged, origin_of, words_of
from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_keys import FULL, Fancy, along, is_mask
from meshdist.tensor.index_parts import nothing, open_axes, pending_op, uncut, with_pending
from meshdist.tensor.index_space import moved_by_others
from meshdist.tensor.operands import aligned, require

_NAME = "x[key]"


def gathered(y: DTensor, dims: Sequence[int], arrays: Sequence[Any]) -> tuple[DTensor, int, int]:
    """Return `y` indexed by integer arrays along `dims`, and the first and the number of the dimensions they become.

    Along a sharded dimension each rank takes what it has, and the result is a pending sum.
    """
    width, _ = checked_indices(y.shape, dims, arrays)
    y = with_pending(y, open_axes(y.layout, dims))
    labels = [tuple(("x", dim) for dim in range(y.ndim)), *(tuple(range(-np.ndim(array), 0)) for array in arrays)]
    (block, *indices), alignment, mesh = aligned(_NAME, [y, *arrays], labels, moved_by_others, _called(arrays))
    lying = alignment.targets[0]
    index = lying.index(coordinate_in(mesh))
    local, owned = local_indices(y.shape, index, lying, dims, indices)
    place = place_of(dims)
    extent = np.broadcast_shapes(*(array.shape for array in local))
    rest = [dim for dim in range(y.ndim) if dim not in dims]
    if any(lying.cuts[dim] is not None and index[dim].start == index[dim].stop for dim in dims):
        shape = [block.shape[dim] for dim in rest]
        picked = nothing((*shape[:place], *extent, *shape[place:]), y)
    else:
        picked = block[key_of(dims, local, y.ndim)]
        if owned is not None:
            picked[along(place, ~_spread(owned, extent))] = nothing((), y)
    shape_of_indices = np.broadcast_shapes(*map(np.shape, arrays))
    shape = [y.shape[dim] for dim in rest]
    cuts = alignment.cuts_of([("x", dim) for dim in rest])
    cuts_of_indices = alignment.cuts_of(range(-width, 0))
    lost = open_axes(lying, dims)
    pending = dict(alignment.pending) | dict.fromkeys(lost, pending_op(y))
    layout = ArrayLayout.of_cuts(
        (*shape[:place], *shape_of_indices, *shape[place:]),
        mesh.shape,
        (*cuts[:place], *cuts_of_indices, *cuts[place:]),
        pending,
    )
    origin = merged(y._origin, origin_of(lying) if lost else None) if pending else None
    return wrap(picked, layout, mesh, origin), place, width


def checked_indices(shape: tuple[int, ...], dims: Sequence[int], arrays: Sequence[Any]) -> tuple[int, tuple[int, ...]]:
    """Return the number of dimensions and the shape of integer arrays that are broadcast; raise as NumPy for bad ones.

    Of an array of indices that is sharded each rank checks its part, and the error is raised where the bad index is.
    """
    try:
        extent = np.broadcast_shapes(*map(np.shape, arrays))
    except ValueError:
        raise IndexError(
            "shape mismatch: indexing arrays could not be broadcast together with shapes "
            + " ".join(str(np.shape(array)) for array in arrays)
        ) from None
    for dim, array in zip(dims, arrays, strict=True):
        if isinstance(array, DTensor) and array.layout.pending:
            continue
        values = array.to_local() if isinstance(array, DTensor) else array
        if values.size:
            least, most = int(values.min()), int(values.max())
            if least < -shape[dim] or most >= shape[dim]:
                bad = least if least < -shape[dim] else most
                raise IndexError(f"index {bad} is out of bounds for axis {dim} with size {shape[dim]}")
    return len(extent), extent


def local_indices(
    shape: tuple[int, ...], index: Sequence[slice], layout: ArrayLayout, dims: Sequence[int], arrays: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Return integer arrays as indices of this rank's block, and where they are all in it; None: everywhere."""
    local = []
    owned = None
    for dim, array in zip(dims, arrays, strict=True):
        rows = array
        if (array < 0).any():
            rows = array + shape[dim] * (array < 0)
        if layout.cuts[dim] is not None:
            inside = (rows >= index[dim].start) & (rows < index[dim].stop)
            rows = (rows.astype(np.intp) - index[dim].start) * inside
            owned = inside if owned is None else owned & inside
        local.append(rows)
    return local, owned


def place_of(dims: Sequence[int]) -> int:
    """Return where NumPy puts the dimensions of arrays that index `dims`: in their place if they are neighbours."""
    return dims[0] if list(dims) == list(range(dims[0], dims[0] + len(dims))) else 0


def _called(arrays: Sequence[Any]) -> list[str]:
    """Return what messages call an array and the arrays that index it."""
    return ["x", *(["key"] if len(arrays) == 1 else [f"array {number} of key" for number in range(len(arrays))])]


def key_of(dims: Sequence[int], arrays: Sequence[Any], ndim: int) -> tuple[Any, ...]:
    by_dim = dict(zip(dims, arrays, strict=True))
    return tuple(by_dim.get(dim, FULL) for dim in range(ndim))


def _spread(owned: Any, extent: tuple[int, ...]) -> Any:
    return owned if owned.shape == extent else np.broadcast_to(owned, extent)


def masked(y: DTensor, dim: int, mask: Any) -> DTensor:
    """Return the elements of `y` where a mask of dimensions `dim` and on is true; they become one dimension.

    Of a sharded dimension each rank keeps its part. The ranks exchange how many elements that are, if they do
    not have all of the mask.
    """
    inner = range(dim + 1, dim + mask.ndim)
    why = "only the first dimension of a mask may be sharded, since the elements are in the order of all dimensions"
    y = wrap(*uncut(_NAME, y, inner, why), y.mesh, y._origin)
    if isinstance(mask, DTensor):
        mask = wrap(*uncut(_NAME, mask, [at - dim for at in inner], why, "mask"), mask.mesh, mask._origin)
    labels = (tuple(range(y.ndim)), tuple(range(dim, dim + mask.ndim)))
    (block, local), alignment, mesh = aligned(_NAME, [y, mask], labels, moved_by_others, ("x", "mask"))
    rows, cut = rows_of_mask(mask, local, alignment.cuts.get(dim), mesh)
    cuts = alignment.cuts_of(range(y.ndim))
    layout = ArrayLayout.of_cuts(
        (*y.shape[:dim], rows, *y.shape[dim + mask.ndim :]),
        mesh.shape,
        (*cuts[:dim], cut, *cuts[dim + mask.ndim :]),
        alignment.pending,
    )
    origin = y._origin if layout.pending else None
    return wrap(block[along(dim, array_module(mesh).asarray(local))], layout, mesh, origin)


def rows_of_mask(mask: Any, local: Any, cut: Cut | None, mesh: DeviceMesh) -> tuple[int, Cut | None]:
    """Return in how many places a mask is true, and how they are sharded if its first dimension is.

    Args:
        mask: The mask.
        local: This rank's part of it.
        cut: The cut of its first dimension.
        mesh: The mesh.
    """
    if cut is None:
        return int(local.sum()), None
    whole = mask.to_local() if isinstance(mask, DTensor) else mask
    if isinstance(mask, DTensor) and not mask.layout.is_replicated:
        target = mask.layout.resolved().with_cuts((cut, *[None] * (mask.ndim - 1)))
        counts = _told(int(local.sum()), cut.axes, mesh, words_of("x[mask] with a mask", target))
    else:
        by_row = whole.reshape(whole.shape[0], -1).sum(1) if whole.size else np.zeros(whole.shape[0], int)
        before = [0, *map(int, by_row.cumsum())]
        edges = [before[row] for row in accumulate(cut.sizes, initial=0)]
        counts = [after - first for first, after in pairwise(edges)]
    return sum(counts), Cut(cut.axes, tuple(counts))


def _told(count: int, axes: Sequence[int], mesh: DeviceMesh, words: str) -> list[int]:
    """Return the counts of the ranks along `axes`, in row-major order."""
    module = array_module(mesh)
    counts = module.asarray([count], np.int64)
    for axis in reversed(axes):
        gathered_counts = [module.empty(len(counts), np.int64) for _ in range(mesh.shape[axis])]
        group = mesh.get_group(axis)
        with group.hooks.comparing(words):
            group.all_gather(gathered_counts, counts)
        counts = module.concatenate(gathered_counts)
    return [int(number) for number in counts.tolist()]


def without_masks(name: str, parts: Fancy) -> tuple[list[int], list[Any]]:
    """Return dimensions and integer arrays; a mask is the arrays of the indices where it is true."""
    dims: list[int] = []
    arrays: list[Any] = []
    for dim, array in zip(parts.dims, parts.arrays, strict=True):
        if is_mask(array):
            dims += range(dim, dim + array.ndim)
            arrays += replicated(name, array).nonzero()
        else:
            dims.append(dim)
            arrays.append(array)
    return dims, arrays


def replicated(name: str, array: Any) -> Any:
    """Return an array of indices that all ranks need in whole."""
    if not isinstance(array, DTensor):
        return array
    target = ArrayLayout.of_cuts(array.shape, array.mesh.shape, (None,) * array.ndim, {})
    return require(name, array, target, "every rank needs all of the indices", "key")
