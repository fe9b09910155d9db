"""Functions that rearrange the dimensions of DTensors: views of the blocks, without messages."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.dispatch import implements
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_keys import FULL, normalized
from meshdist.tensor.index_parts import uncut
from meshdist.tensor.known_calls import localizes, on_blocks
from meshdist.tensor.operands import require
from meshdist.tensor.placements import Replicate, Shard

# ---- Dimensions in a different order, and new ones


def _with_dims(layout: ArrayLayout, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArrayLayout:
    """Return the layout of what `function` makes, which moves dimensions and adds some of one row.

    It is asked where the dimensions go: each of a small array has a different number of rows, from 2 on.
    """
    asked = np.broadcast_to(np.int8(0), range(2, layout.ndim + 2))
    sources = [rows - 2 if rows > 1 else None for rows in function(asked, *args, **kwargs).shape]
    return ArrayLayout.of_cuts(
        [1 if dim is None else layout.shape[dim] for dim in sources],
        layout.mesh_shape,
        [None if dim is None else layout.cuts[dim] for dim in sources],
        layout.pending,
    )


def _rearranging(function: Any) -> None:
    @implements(function)
    def rearranged(a: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        layout = _with_dims(a.layout, function, args, kwargs)
        return wrap(function(a.to_local(), *args, **kwargs), layout, a.mesh, a._origin)

    on_blocks(function)


_function: Any
for _function in (np.transpose, np.swapaxes, np.moveaxis, np.rollaxis, np.expand_dims):
    _rearranging(_function)
if hasattr(np, "permute_dims") and np.permute_dims is not np.transpose:
    _rearranging(np.permute_dims)
if hasattr(np, "matrix_transpose"):
    _rearranging(np.matrix_transpose)


def _at_least(function: Any) -> None:
    @implements(function)
    def at_least(*arys: Any) -> Any:
        results = [_one(array) if isinstance(array, DTensor) else function(array) for array in arys]
        return results[0] if len(results) == 1 else type(function(0, 0))(results)

    def _one(a: DTensor) -> DTensor:
        return wrap(function(a.to_local()), _with_dims(a.layout, function, (), {}), a.mesh, a._origin)

    on_blocks(function)


for _function in (np.atleast_1d, np.atleast_2d, np.atleast_3d):
    _at_least(_function)


@implements(np.squeeze)
def squeeze(a: DTensor, axis: Any = None) -> Any:
    """Return the array without dimensions of one row; see `numpy.squeeze`."""
    if axis is None:
        dims = {dim for dim, rows in enumerate(a.shape) if rows == 1}
    else:
        listed = axis if isinstance(axis, (tuple, list)) else () if a.ndim == 0 and axis in (0, -1) else (axis,)
        dims = {normalized(dim, a.ndim) for dim in listed}
        if any(a.shape[dim] != 1 for dim in dims):
            raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    key = tuple(0 if dim in dims else FULL for dim in range(a.ndim))
    return a[key + (...,)]  # noqa: RUF005  # a view, of no dimensions too


# ---- Broadcasting


@implements(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> DTensor:
    """Return the array repeated along dimensions; see `numpy.broadcast_to`."""
    del subok
    shape = tuple(map(operator.index, (shape,) if np.ndim(shape) == 0 else shape))
    np.broadcast_to(np.broadcast_to(np.int8(0), array.shape), shape)  # raises for shapes that do not fit
    added = len(shape) - array.ndim
    repeated = [dim for dim, rows in enumerate(array.shape) if rows != shape[dim + added]]
    block, layout = uncut("np.broadcast_to", array, repeated, "it repeats a row that one rank has")
    cuts = (None,) * added + layout.cuts
    target = ArrayLayout.of_cuts(shape, layout.mesh_shape, cuts, layout.pending)
    local = np.broadcast_to(block, target.local_shape(coordinate_in(array.mesh)))
    return wrap(local, target, array.mesh, array._origin)


@localizes(np.broadcast_to)
def _broadcast_alike(result: DTensor, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    shape = result.to_local().shape
    return lambda block, *_, **__: np.broadcast_to(block, shape)


@implements(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> Any:
    """Return arrays repeated to one shape; see `numpy.broadcast_arrays`."""
    shape = np.broadcast_shapes(*map(np.shape, args))
    return type(np.broadcast_arrays(0, 0))(np.broadcast_to(array, shape, subok) for array in args)


# ---- Another shape


@implements(np.reshape)
def reshape(
    a: Any, /, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: bool | None = None
) -> DTensor:
    """Return the array with a different shape, where no element changes its rank; see `numpy.reshape`.

    The elements stay where they are if each sharded dimension is the outermost of those that are split or merged with
    it, and blocks are of whole rows of the result.

    Raises:
        ValueError: Order "A" or "K" of several dimensions, or `copy=False`: how the blocks lie in memory may differ
            between ranks.
    """
    shape = newshape if shape is None else shape
    if shape is None:
        raise TypeError("reshape() missing 1 required positional argument: 'shape'")
    shape = tuple(map(operator.index, (shape,) if np.ndim(shape) == 0 else shape))
    if copy is False:
        raise ValueError(
            "np.reshape: copy=False is not available for DTensors, since the blocks may need a copy on some ranks and"
            " not on others; leave copy= out"
        )
    _check_order("np.reshape", order, "CFA", a.ndim)
    if order == "F":
        turned: Any = np.transpose(a)
        return np.transpose(np.reshape(turned, shape[::-1], copy=copy))  # type: ignore[return-value]
    cuts, lying = _cuts_of_shape(a.layout, whole := _whole_shape(a.shape, shape))
    block = a.to_local()
    if lying is not a.layout:
        why = f"to reshape {a.shape} to {whole} would move elements between ranks"
        block = require("np.reshape", a, lying, why, advised=_understandable(a.layout, lying))
        cuts, _ = _cuts_of_shape(lying, whole)
    layout = ArrayLayout.of_cuts(whole, a.layout.mesh_shape, cuts, a.layout.pending)
    local = block.reshape(layout.local_shape(coordinate_in(a.mesh)))
    return wrap(local.copy() if copy else local, layout, a._mesh, a._origin)


@localizes(np.reshape, np.ravel)
def _reshaped_alike(result: DTensor, a: Any, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    shape = result.to_local().shape
    return None if kwargs or args[1:] or args[:1] == ("F",) else lambda block, *_: block.reshape(shape)


@implements(np.ravel)
def ravel(a: DTensor, order: str = "C") -> DTensor:
    """Return the array with one dimension, where no element changes its rank; see `numpy.ravel`."""
    _check_order("np.ravel", order, "CFAK", a.ndim)
    return reshape(a, -1, "F" if order == "F" else "C")


def _check_order(name: str, order: str, known: str, ndim: int) -> None:
    if order not in tuple(known):
        raise ValueError(f"{name}: order must be one of {', '.join(map(repr, known))} (got {order!r})")
    if order in "AK" and ndim > 1:
        raise ValueError(
            f"{name}: order {order!r} depends on how the blocks lie in memory, which may differ between ranks; write"
            " order='C' or order='F'"
        )


def _whole_shape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with its -1 replaced; raise as NumPy for one of a different size."""
    size = math.prod(old)
    if sum(rows < 0 for rows in new) > 1:
        raise ValueError("can only specify one unknown dimension")
    known = math.prod(rows for rows in new if rows >= 0)
    if any(rows < 0 for rows in new) and known and size % known == 0:
        return tuple(size // known if rows < 0 else rows for rows in new)
    if any(rows < 0 for rows in new) or known != size:
        raise ValueError(f"cannot reshape array of size {size} into shape {new}")
    return new


def _cuts_of_shape(layout: ArrayLayout, shape: tuple[int, ...]) -> tuple[list[Cut | None], ArrayLayout]:
    """Return the cuts of the array in a different shape, and the layout in which it has to lie for that."""
    cuts: list[Cut | None] = [None] * len(shape)
    if 0 in shape:
        return cuts, layout  # every rank has all that there is
    lying = list(layout.cuts)
    for olds, news in _groups(layout.shape, shape):
        found = [dim for dim in olds if layout.cuts[dim] is not None]
        if not found:
            continue
        lying = [None if at in found else known for at, known in enumerate(lying)]
        new = next((at for at in news if shape[at] > 1), news[0] if news else None)
        if new is None:
            continue
        # The axes of the first cut have to cut the outermost dimension.
        cut = layout.cuts[found[0]]
        assert cut is not None
        dim = next(at for at in olds if at == found[0] or layout.shape[at] > 1)
        sizes = cut.sizes if dim == found[0] else _even_sizes(layout.shape[dim], cut.axes, layout.mesh_shape)
        row = math.prod(layout.shape[at] for at in olds if at > dim)
        new_row = math.prod(shape[at] for at in news if at > new)
        unit = new_row // math.gcd(row, new_row)  # blocks of a multiple of so many rows are whole rows of the result
        fitting = _in_units(sizes, unit)
        if dim != found[0] and max(fitting) == sum(fitting):
            continue  # rather than one rank, all have them
        cuts[new] = Cut(cut.axes, tuple(size * row // new_row for size in fitting))
        lying[dim] = Cut(cut.axes, fitting)
    return cuts, layout.with_cuts(lying)


def _even_sizes(rows: int, axes: Sequence[int], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    placements = [Shard(0) if axis in axes else Replicate() for axis in range(len(mesh_shape))]
    (cut,) = ArrayLayout.of((rows,), mesh_shape, placements).cuts
    return (rows,) if cut is None else cut.sizes


def _understandable(layout: ArrayLayout, lying: ArrayLayout) -> ArrayLayout:
    """Return what to write in place of the layout `lying`: where one rank would get all rows, all ranks get them."""
    cuts = [
        None if cut is not None and cut is not old and cut != old and max(cut.sizes) == sum(cut.sizes) else cut
        for old, cut in zip(layout.cuts, lying.cuts, strict=True)
    ]
    return lying.with_cuts(cuts)


def _in_units(sizes: Sequence[int], unit: int) -> tuple[int, ...]:
    """Return sizes that are multiples of `unit`, as near as can be, for as many rows."""
    if all(size % unit == 0 for size in sizes):
        return tuple(sizes)
    edges, end = [0], 0
    for size in sizes:
        end += size
        edges.append((end + unit // 2) // unit * unit)
    edges[-1] = end
    return tuple(after - before for before, after in pairwise(edges))


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the dimensions that are split or merged together: the fewest of both shapes with as many elements."""
    groups = []
    at, to = 0, 0
    while at < len(old) or to < len(new):
        olds, news, rows, new_rows = [], [], 1, 1
        if at < len(old):
            olds, rows, at = [at], old[at], at + 1
        if to < len(new):
            news, new_rows, to = [to], new[to], to + 1
        while rows != new_rows:
            if rows < new_rows:
                olds, rows, at = [*olds, at], rows * old[at], at + 1
            else:
                news, new_rows, to = [*news, to], new_rows * new[to], to + 1
        groups.append((olds, news))
    return groups
