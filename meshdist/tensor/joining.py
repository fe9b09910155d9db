"""Functions that join, split, repeat, pad, reverse and roll DTensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout, Cut, is_whole, number_in
from meshdist.tensor.dispatch import implements, may_redistribute
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_keys import along, normalized
from meshdist.tensor.index_parts import uncut
from meshdist.tensor.index_space import Alignment, align, together
from meshdist.tensor.known_calls import localizes, on_blocks, on_blocks_of_lists
from meshdist.tensor.operands import (
    aligned,
    checked_out,
    layout_of,
    local_of,
    may_pass,
    mesh_of,
    origin_among,
    refuse_placements,
    written,
)

# ---- Joining


@implements(np.concatenate)
def concatenate(
    arrays: Sequence[Any], axis: int | None = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> DTensor:
    """Return arrays joined along a dimension that is not sharded; see `numpy.concatenate`."""
    name = "np.concatenate"
    operands = [array if hasattr(array, "ndim") else np.asarray(array) for array in arrays]
    if axis is None:
        operands, axis = [np.ravel(array) for array in operands], 0
    # Arrays without rows: they raise as the whole ones would, and tell the dtype.
    emptied = [np.empty(_without_rows(array.shape, axis), array.dtype) for array in operands]
    joined: Any = np.concatenate(emptied, axis, dtype=dtype, casting=casting)  # type: ignore[call-overload]
    axis = normalized(axis, joined.ndim)
    operands = _uncut_all(name, operands, axis)
    labels = [
        tuple((number, dim) if dim == axis else dim for dim in range(joined.ndim)) for number in range(len(operands))
    ]
    blocks, alignment, mesh = aligned(name, operands, labels, together if may_pass(operands, joined.dtype) else None)
    shape = list(joined.shape)
    shape[axis] = sum(array.shape[axis] for array in operands)
    layout = ArrayLayout.of_cuts(shape, mesh.shape, alignment.cuts_of(range(joined.ndim)), alignment.pending)
    module = array_module(mesh)
    local = module.concatenate([module.asarray(block) for block in blocks], axis).astype(joined.dtype, copy=False)
    result = wrap(local, layout, mesh, origin_among(operands, layout))
    return written(name, result, checked_out(name, out, result.shape), casting)


def _without_rows(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(0 if dim in (axis, axis + len(shape)) else rows for dim, rows in enumerate(shape))


def _uncut_all(name: str, operands: list[Any], axis: int) -> list[Any]:
    """Return operands that are not sharded along dimension `axis`; one error names all that are."""
    mesh = mesh_of(name, operands)
    layouts = [layout_of(operand, mesh) for operand in operands]
    cut = tuple(number for number, layout in enumerate(layouts) if layout.cuts[axis] is not None)
    if not cut:
        return operands
    targets = tuple(layout.uncut((axis,)) for layout in layouts)
    refused = tuple(number for number in cut if len(layouts[number].cuts[axis].sizes) > 1)  # type: ignore[union-attr]
    if refused and not may_redistribute.get():
        why = f"joining along dimension {axis}, which is sharded, would move rows between ranks"
        refuse_placements(name, operands, Alignment(targets, {}, {}, refused), mesh, why)
    return [
        wrap(local_of(operand, target, mesh), target, mesh, operand._origin) if number in cut else operand
        for number, (operand, target) in enumerate(zip(operands, targets, strict=True))
    ]


def _check_alike(name: str, arrays: Sequence[Any]) -> None:
    """Raise for arrays whose placements do not match, before they get another dimension."""
    mesh = mesh_of(name, arrays)
    layouts = tuple(layout_of(array, mesh) for array in arrays)
    alignment = align(layouts, (tuple(range(np.ndim(arrays[0]))),) * len(arrays), together)
    if alignment.conflicts and not may_redistribute.get():
        refuse_placements(name, arrays, alignment, mesh)


@implements(np.stack)
def stack(arrays: Sequence[Any], axis: int = 0, out: Any = None, **kwargs: Any) -> DTensor:
    """Return arrays joined along a new dimension; see `numpy.stack`."""
    arrays = list(arrays)  # one array is its rows
    if len({np.shape(array) for array in arrays}) > 1:
        raise ValueError("all input arrays must have the same shape")
    axis = normalized(axis, np.ndim(arrays[0]) + 1)
    _check_alike("np.stack", arrays)
    return concatenate([np.expand_dims(array, axis) for array in arrays], axis, out, **kwargs)


@implements(np.vstack)
def vstack(tup: Sequence[Any], **kwargs: Any) -> DTensor:
    """Return arrays joined along the first dimension; see `numpy.vstack`."""
    if all(np.ndim(array) == 1 for array in tup):
        _check_alike("np.vstack", tup)
    return concatenate([np.atleast_2d(array) for array in tup], 0, **kwargs)


@implements(np.hstack)
def hstack(tup: Sequence[Any], **kwargs: Any) -> DTensor:
    """Return arrays joined along the second dimension, or the only one; see `numpy.hstack`."""
    arrays = [np.atleast_1d(array) for array in tup]
    return concatenate(arrays, 0 if arrays[0].ndim == 1 else 1, **kwargs)


@implements(np.dstack)
def dstack(tup: Sequence[Any]) -> DTensor:
    """Return arrays joined along the third dimension; see `numpy.dstack`."""
    return concatenate([np.atleast_3d(array) for array in tup], 2)


@implements(np.column_stack)
def column_stack(tup: Sequence[Any]) -> DTensor:
    """Return arrays joined as columns; see `numpy.column_stack`."""
    return concatenate([np.atleast_2d(array).T if np.ndim(array) < 2 else array for array in tup], 1)


@implements(np.append)
def append(arr: Any, values: Any, axis: int | None = None) -> DTensor:
    """Return an array with values joined to its end; see `numpy.append`."""
    return concatenate((arr, values), axis)


# ---- Splitting


@implements(np.array_split)
def array_split(ary: DTensor, indices_or_sections: Any, axis: int = 0) -> list[DTensor]:
    """Return the pieces of an array along any dimension; nothing is sent; see `numpy.array_split`."""
    axis = normalized(axis, ary.ndim)
    rows = ary.shape[axis]
    if np.ndim(indices_or_sections):
        edges = [0, *map(int, indices_or_sections), rows]
    else:
        sections = int(indices_or_sections)
        if sections <= 0:
            raise ValueError("number sections must be larger than 0.")
        each, more = divmod(rows, sections)
        edges = list(accumulate([each + 1] * more + [each] * (sections - more), initial=0))
    return [ary[along(axis, slice(first, end))] for first, end in pairwise(edges)]


@implements(np.split)
def split(ary: DTensor, indices_or_sections: Any, axis: int = 0) -> list[DTensor]:
    """Return the equal pieces of an array along a dimension, or those between indices; see `numpy.split`."""
    if np.ndim(indices_or_sections) == 0 and ary.shape[normalized(axis, ary.ndim)] % int(indices_or_sections):
        raise ValueError("array split does not result in an equal division")
    return array_split(ary, indices_or_sections, axis)


def _splitting(function: Any, least: int, dim: int) -> None:
    @implements(function)
    def split_along(ary: DTensor, indices_or_sections: Any) -> list[DTensor]:
        if ary.ndim < least:
            raise ValueError(f"{function.__name__} only works on arrays of {least} or more dimensions")
        return split(ary, indices_or_sections, min(dim, ary.ndim - 1))


_function: Any
for _function, _least, _dim in ((np.vsplit, 2, 0), (np.hsplit, 1, 1), (np.dsplit, 3, 2)):
    _splitting(_function, _least, _dim)


# ---- Repeating


@implements(np.repeat)
def repeat(a: DTensor, repeats: Any, axis: int | None = None) -> DTensor:
    """Return the array with each row repeated, sharded dimensions too; see `numpy.repeat`."""
    if axis is None or a.ndim == 0:
        a, axis = np.ravel(a), axis or 0  # type: ignore[assignment]
    axis = normalized(axis, a.ndim)
    counts = np.asarray(repeats, np.intp if isinstance(repeats, (list, tuple)) and not repeats else None)
    if counts.ndim > 1:
        raise ValueError("object too deep for desired array")
    if counts.dtype.kind not in "biu":
        raise TypeError(f"Cannot cast array data from {counts.dtype!r} to dtype('int64') according to the rule 'safe'")
    counts = np.broadcast_to(counts, a.shape[axis])
    if (counts < 0).any():
        raise ValueError("repeats may not contain negative values.")
    held = a.index[axis]
    cut = a.layout.cuts[axis]
    shape = list(a.shape)
    shape[axis] = int(counts.sum())
    cuts = list(a.layout.cuts)
    if cut is not None:
        before = np.concatenate([[0], counts.cumsum()])
        edges = [int(before[row]) for row in accumulate(cut.sizes, initial=0)]
        cuts[axis] = Cut(cut.axes, tuple(end - first for first, end in pairwise(edges)))
    layout = ArrayLayout.of_cuts(shape, a.layout.mesh_shape, cuts, a.layout.pending)
    local = a.to_local().repeat(int(np.ravel(repeats)[0]) if np.size(repeats) == 1 else counts[held].tolist(), axis)
    return wrap(local, layout, a.mesh, a._origin)


@implements(np.tile)
def tile(A: DTensor, reps: Any) -> DTensor:
    """Return the array repeated along dimensions that are not sharded; see `numpy.tile`."""
    times = tuple(map(operator.index, (reps,) if np.ndim(reps) == 0 else reps))
    if min(times, default=0) < 0:
        raise ValueError("negative dimensions are not allowed")
    added = max(0, len(times) - A.ndim)
    times = (1,) * (A.ndim - len(times)) + times
    along = [dim for dim in range(A.ndim) if times[dim + added] != 1]
    block, layout = uncut("np.tile", A, along, "the repeated dimensions must not be sharded")
    shape = [rows * count for rows, count in zip((1,) * added + A.shape, times, strict=True)]
    cuts = (None,) * added + layout.cuts
    module = array_module(A.mesh)
    tiled = ArrayLayout.of_cuts(shape, A.mesh.shape, cuts, layout.pending)
    return wrap(module.tile(block, times), tiled, A.mesh, A._origin)


# ---- Padding

# What may be done where a dimension is cut: the outer ranks' blocks grow. And what only moves elements.
_AT_THE_EDGE = ("constant", "empty", "edge")
_MOVING = ("edge", "reflect", "symmetric", "wrap")


@implements(np.pad)
def pad(array: DTensor, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> DTensor:
    """Return the array with rows added at both ends; see `numpy.pad`.

    Along a sharded dimension with the modes "constant", "edge" and "empty", without messages: the outer blocks grow.
    """
    ndim = array.ndim
    if isinstance(pad_width, dict):
        given: list[Any] = [(0, 0)] * ndim
        for dim, width in pad_width.items():
            given[normalized(dim, ndim)] = (width, width) if np.ndim(width) == 0 else width
        pad_width = given
    widths = np.asarray(pad_width)
    if widths.dtype.kind != "i":
        raise TypeError("`pad_width` must be of integral type.")
    widths = np.broadcast_to(widths, (ndim, 2)) if ndim else np.zeros((0, 2), int)
    if (widths < 0).any():
        raise ValueError("index can't contain negative values")
    np.pad(np.zeros((1,) * ndim, array.dtype), 0, mode, **kwargs)  # raises for a mode or arguments that are wrong
    padded = [dim for dim in range(ndim) if widths[dim].any()]
    if mode not in ("constant", "empty") and any(array.shape[dim] == 0 for dim in padded):
        raise ValueError(f"can't extend an empty axis using modes other than 'constant' or 'empty', got {mode!r}")
    if not isinstance(mode, str) or mode not in _AT_THE_EDGE:
        why = f"mode {mode!r} takes rows of the whole dimension"
        array = wrap(*uncut("np.pad", array, padded, why), array.mesh, array._origin)
    layout = array.layout if mode in _MOVING else array.layout.resolved()
    block = local_of(array, layout, array.mesh)
    coordinate = coordinate_in(array.mesh)
    local_widths = [tuple(map(int, pair)) for pair in widths]
    cuts = list(layout.cuts)
    for dim in padded:
        cut = cuts[dim]
        if cut is None:
            continue
        # The first and the last block that has rows grow, or of an array without rows the first.
        filled = [number for number, rows in enumerate(cut.sizes) if rows] or [0]
        mine = number_in(cut.axes, coordinate, layout.mesh_shape)
        sizes = list(cut.sizes)
        sizes[filled[0]] += local_widths[dim][0]
        sizes[filled[-1]] += local_widths[dim][1]
        local_widths[dim] = tuple(
            width if mine == block_number else 0
            for width, block_number in zip(local_widths[dim], (filled[0], filled[-1]), strict=True)
        )
        cuts[dim] = Cut(cut.axes, tuple(sizes))
    shape = [rows + int(pair.sum()) for rows, pair in zip(array.shape, widths, strict=True)]
    result = ArrayLayout.of_cuts(shape, layout.mesh_shape, cuts, layout.pending)
    padded_block = array_module(array.mesh).pad(block, local_widths or 0, mode, **kwargs)
    return wrap(padded_block, result, array.mesh, array._origin if result.pending else None)


# ---- Reversing and rolling


@implements(np.flip)
def flip(m: DTensor, axis: Any = None) -> DTensor:
    """Return the array reversed along dimensions that are not sharded; see `numpy.flip`."""
    dims = range(m.ndim) if axis is None else [normalized(dim, m.ndim) for dim in np.atleast_1d(axis).tolist()]
    if len(set(dims)) < len(dims):
        raise ValueError("repeated axis")
    block, layout = uncut("np.flip", m, dims, "reversing a dimension moves all of its rows")
    return wrap(np.flip(block, tuple(dims)), layout, m.mesh, m._origin)


def _flipping(function: Any, least: int, axis: int) -> None:
    @implements(function)
    def flipped(m: DTensor) -> DTensor:
        if m.ndim < least:
            raise ValueError(f"Input must be >= {least}-d.")
        return flip(m, axis)


for _function, _least, _dim in ((np.flipud, 1, 0), (np.fliplr, 2, 1)):
    _flipping(_function, _least, _dim)


@implements(np.roll)
def roll(a: DTensor, shift: Any, axis: Any = None) -> DTensor:
    """Return the array with its rows moved on around a dimension; see `numpy.roll`.

    Along a sharded dimension the rows that change their rank are sent.
    """
    if axis is None:
        return np.reshape(roll(np.ravel(a), shift, 0), a.shape)  # type: ignore[arg-type,return-value]
    if max(np.ndim(shift), np.ndim(axis)) > 1:
        raise ValueError("'shift' and 'axis' should be scalars or 1D sequences")
    shifts, dims = np.broadcast_arrays(shift, axis)
    total: dict[int, int] = {}
    for by, dim in zip(shifts.reshape(-1).tolist(), dims.reshape(-1).tolist(), strict=True):
        dim = normalized(dim, a.ndim)
        total[dim] = total.get(dim, 0) + int(by)
    free = [dim for dim in total if a.layout.cuts[dim] is None]
    local = array_module(a.mesh).roll(a.to_local(), [total[dim] for dim in free], free) if free else a.to_local().copy()
    result = wrap(local, a.layout, a.mesh, a._origin)
    for dim, by in total.items():
        if dim not in free and a.size and by % a.shape[dim]:
            result = _rolled(result, by % a.shape[dim], dim)
    return result


def _rolled(a: DTensor, by: int, dim: int) -> DTensor:
    """Return the array rolled along a sharded dimension: the rows that come first then, and the others, each moved."""
    cut = a.layout.cuts[dim]
    assert cut is not None
    rows = a.shape[dim]
    edges = list(accumulate(cut.sizes, initial=0))
    blocks = []
    for part, (first, end) in ((slice(rows - by, rows), (0, by)), (slice(0, rows - by), (by, rows))):
        piece = a[along(dim, part)]
        sizes = [max(0, min(after, end) - max(before, first)) for before, after in pairwise(edges)]
        cuts = [Cut(cut.axes, tuple(sizes)) if at == dim else known for at, known in enumerate(piece.layout.cuts)]
        blocks.append(piece._moved(piece.layout.with_cuts(cuts)))
    return wrap(array_module(a.mesh).concatenate(blocks, dim), a.layout, a.mesh, a._origin)


# ---- Again, on the blocks

on_blocks_of_lists(np.concatenate, np.stack, np.vstack, np.hstack, np.dstack, np.column_stack)
on_blocks(np.flip, np.flipud, np.fliplr, np.tile)


@localizes(np.append)
def _appended_alike(result: DTensor, arr: Any, values: Any, axis: Any = None) -> Any:
    return None if axis is None else np.append


@localizes(np.roll)
def _rolled_alike(result: DTensor, a: DTensor, shift: Any, axis: Any = None) -> Any:
    return np.roll if axis is not None and is_whole(a.layout, axis) else None


@localizes(np.repeat)
def _repeated_alike(result: DTensor, a: DTensor, repeats: Any, axis: Any = None) -> Any:
    return np.repeat if axis is not None and is_whole(a.layout, axis) else None


@localizes(np.pad)
def _padded_alike(result: DTensor, array: DTensor, *args: Any, **kwargs: Any) -> Any:
    padded = tuple(dim for dim in range(array.ndim) if array.shape[dim] != result.shape[dim])
    return np.pad if is_whole(array.layout, padded) else None
