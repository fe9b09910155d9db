"""Assignment to parts of DTensors, `x[key] = value`: each rank writes what it holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import NUMBERS, implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_arrays import (
    checked_indices,
    key_of,
    local_indices,
    place_of,
    replicated,
    rows_of_mask,
    without_masks,
)
from meshdist.tensor.index_keys import (
    Fancy,
    along,
    dims_of,
    fancy,
    is_array,
    is_mask,
    parsed,
    remembered_key,
)
from meshdist.tensor.index_parts import backward, nothing, part_of, view_layout
from meshdist.tensor.operands import mesh_of, require
from meshdist.tensor.placements import PlacementError

_NAME = "x[key] = value"


@implements("__setitem__")
def setitem(x: DTensor, key: Any, value: Any) -> None:
    """Do `x[key] = value`."""
    _refuse_pending(_NAME, x)
    known = remembered_key(key)
    if known is not None and type(value) in NUMBERS and view_layout(x.layout, known) is not None:
        x.to_local()[key] = value
        return
    mesh_of(_NAME, (x, *(key if isinstance(key, tuple) else (key,)), value))
    value = _checked(value, x)
    if type(key) is DTensor and key.layout is x.layout and key.dtype.kind == "b" and type(value) in NUMBERS:
        x.to_local()[key.to_local()] = value
        return
    entries = parsed(key, x.shape)
    if known is None and any(map(is_array, entries)):
        _set_arrays(x, fancy(entries), value)
        return
    forward, value = _forward(x, entries, value)
    part = part_of(x, forward, known if forward is entries else None)
    block = _block_of(value, part.layout.resolved(), x)
    if part.is_held:
        x.to_local()[part.key] = block


def _refuse_pending(name: str, x: DTensor) -> None:
    if x.layout.pending:
        raise PlacementError(
            f"{name}: the array is {x.layout.describe(x.mesh.mesh_dim_names)}, a reduction still to be computed,"
            " of which no rank holds the elements; write x = x.redistribute(...) to placements without Partial first"
        )


@implements("fill")
def fill(x: DTensor, value: Any) -> None:
    """Do `x.fill(value)`."""
    _refuse_pending("x.fill", x)
    setitem(x, ..., value)


def _checked(value: Any, x: DTensor) -> Any:
    """Return a value to set as a number, an array or a DTensor; raise on all ranks for what does not fit the dtype."""
    if type(value) in NUMBERS:
        np.empty((), x.dtype)[...] = value
        return value
    if isinstance(value, DTensor) or type(value).__module__.partition(".")[0] == "cupy":
        return value
    # The numbers of a list must fit the dtype, as one number must; those of an array are cast.
    array = value if isinstance(value, (np.ndarray, np.generic)) else np.asarray(value, x.dtype)
    return array_module(x.mesh).asarray(array if array.dtype.kind in "biufc" else array.astype(x.dtype))


def _block_of(value: Any, layout: ArrayLayout, x: DTensor) -> Any:
    """Return what this rank writes to a part of this layout: the value, or its part of it."""
    if type(value) in NUMBERS:
        return value
    shape = value.shape
    while len(shape) > layout.ndim and shape[0] == 1:
        shape = shape[1:]
    trailing = layout.shape[layout.ndim - len(shape) :]
    if len(shape) > layout.ndim or any(rows not in (1, whole) for rows, whole in zip(shape, trailing, strict=True)):
        raise ValueError(f"could not broadcast input array from shape {value.shape} into shape {layout.shape}")
    if shape != value.shape:
        value = np.reshape(value, shape)
    cuts = layout.cuts[layout.ndim - len(shape) :]
    fitting = [cut if rows == whole else None for cut, rows, whole in zip(cuts, shape, trailing, strict=True)]
    target = ArrayLayout.of_cuts(shape, layout.mesh_shape, fitting, {})
    if isinstance(value, DTensor):
        why = f"the part that it sets is {layout.describe(x.mesh.mesh_dim_names)}"
        return require(_NAME, value, target, why, "value", may_be_shifted=True)
    return value if target.is_replicated else value[target.index(coordinate_in(x.mesh))]


def _forward(x: DTensor, entries: list[Any], value: Any) -> tuple[list[Any], Any]:
    """Return a key and a value without negative steps along sharded dimensions: the value is reversed instead."""
    turned = [dim for dim, rows in backward(x.layout, entries) if rows > 1]
    if not turned:
        return entries, value
    entries = list(entries)
    dim = 0
    flipped = []  # dimensions of the part, counted from the last
    for place, entry in enumerate(entries):
        if dim in turned and dims_of(entry):
            rows = range(x.shape[dim])[entry][::-1]
            entries[place] = slice(rows[0], rows[-1] + 1, rows.step)
            flipped.append(sum(not isinstance(other, int) for other in entries[place:]))
        dim += dims_of(entry)
    ndim = np.ndim(value)
    dims = tuple(ndim - back for back in flipped if back <= ndim)
    return entries, np.flip(value, dims) if dims else value


def _set_arrays(x: DTensor, parts: Fancy, value: Any) -> None:
    """Do `x[key] = value` for a key with arrays."""
    (array, *more), (dim, *_) = parts.arrays, parts.dims
    if any(rows > 1 for _, rows in backward(x.layout, parts.first)):
        raise PlacementError(
            f"{_NAME}: a negative step beside arrays runs along a sharded dimension, and the array is"
            f" {x.layout.describe(x.mesh.mesh_dim_names)}; write the slice with a positive step, or"
            " redistribute the array"
        )
    part = part_of(x, parts.first)
    layout = part.layout.resolved()
    # A rank without the rows that integers take has nothing to write, and writes it to a block of its own.
    block = x.to_local()[part.key] if part.is_held else nothing(part.shape, x)
    view = wrap(block, layout, x.mesh)
    if array.ndim == 0:
        setitem(view, along(dim, slice(0, int(bool(array)))), value)
    elif is_mask(array) and not more:
        _set_masked(view, dim, array, value, parts.in_front)
    else:
        _set_gathered(view, *without_masks(_NAME, parts), value, parts.in_front)


def _set_masked(y: DTensor, dim: int, mask: Any, value: Any, in_front: bool) -> None:
    mesh = y.mesh
    cuts = y.layout.cuts[dim : dim + mask.ndim]
    target = ArrayLayout.of_cuts(mask.shape, mesh.shape, cuts, {})
    if isinstance(mask, DTensor):
        described = y.layout.describe(mesh.mesh_dim_names)
        why = f"the mask must be sharded like the array that it indexes, {described}"
        local = require(_NAME, mask, target, why, "mask")
    else:
        local = mask[target.index(coordinate_in(mesh))]
    if np.ndim(value):
        for inner in range(1, mask.ndim):
            if cuts[inner] is not None:
                raise PlacementError(
                    f"{_NAME}: to assign an array, only the first dimension of a mask may be sharded, since"
                    f" the elements are in the order of all dimensions, and the array is"
                    f" {y.layout.describe(mesh.mesh_dim_names)}; assign a number, or use np.where, or redistribute it"
                )
        rows, cut = rows_of_mask(mask, local, cuts[0], mesh)
        layout = ArrayLayout.of_cuts(
            (*y.shape[:dim], rows, *y.shape[dim + mask.ndim :]),
            mesh.shape,
            (*y.layout.cuts[:dim], cut, *y.layout.cuts[dim + mask.ndim :]),
            {},
        )
        value = _in_place(value, layout.ndim, 1, dim) if in_front else value
        value = _block_of(value, layout, y)
    else:
        value = _block_of(value, ArrayLayout.of_cuts((), mesh.shape, (), {}), y)
    y.to_local()[along(dim, array_module(mesh).asarray(local))] = value


def _set_gathered(y: DTensor, dims: list[int], arrays: list[Any], value: Any, in_front: bool) -> None:
    mesh = y.mesh
    arrays = [replicated(_NAME, array) for array in arrays]
    width, extent = checked_indices(y.shape, dims, arrays)
    coordinate = coordinate_in(mesh)
    local, owned = local_indices(y.shape, y.layout.index(coordinate), y.layout, dims, arrays)
    place = place_of(dims)
    rest = [dim for dim in range(y.ndim) if dim not in dims]
    shape = [y.shape[dim] for dim in rest]
    cuts = [y.layout.cuts[dim] for dim in rest]
    layout = ArrayLayout.of_cuts(
        (*shape[:place], *extent, *shape[place:]),
        mesh.shape,
        (*cuts[:place], *(None,) * width, *cuts[place:]),
        {},
    )
    if in_front and np.ndim(value):
        value = _in_place(value, layout.ndim, width, place)
    block = _block_of(value, layout, y)
    if owned is not None:
        owned = np.broadcast_to(owned, extent)
        local = [np.broadcast_to(rows, extent)[owned] for rows in local]
        if np.ndim(block):
            block = np.broadcast_to(block, layout.local_shape(coordinate))[along(place, owned)]
    y.to_local()[key_of(dims, local, y.ndim)] = block


def _in_place(value: Any, ndim: int, width: int, place: int) -> Any:
    """Return a value whose first dimensions are those of arrays with these where their result has them."""
    if place == 0 or np.ndim(value) == 0 or np.ndim(value) > ndim:
        return value
    whole = np.reshape(value, (1,) * (ndim - np.ndim(value)) + tuple(value.shape))
    return np.moveaxis(whole, range(width), range(place, place + width))


# ---- NumPy's functions that assign


@implements(np.copyto)
def copyto(dst: DTensor, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    """Assign `src` to an array, where a mask is true; see `numpy.copyto`."""
    if not isinstance(dst, DTensor):
        raise TypeError("np.copyto: the destination must be a DTensor where the source or the mask is one")
    _refuse_pending("np.copyto", dst)
    dtype = (
        src.dtype if hasattr(src, "dtype") else np.min_scalar_type(src) if np.ndim(src) == 0 else np.asarray(src).dtype
    )
    if not np.can_cast(dtype, dst.dtype, casting):  # type: ignore[arg-type]
        raise TypeError(f"Cannot cast from {dtype!r} to {dst.dtype!r} according to the rule {casting!r}")
    setitem(dst, ..., src if where is True else np.where(where, src, dst).astype(dst.dtype))


@implements(np.putmask)
def putmask(a: DTensor, mask: Any, values: Any) -> None:
    """Assign values to the elements where a mask of the same shape is true; see `numpy.putmask`.

    The values have the shape of the array, or are one number.
    """
    if not isinstance(a, DTensor) or np.shape(mask) != a.shape or np.shape(values) not in ((), a.shape):
        raise ValueError(
            f"np.putmask: the array must be a DTensor, with a mask and values of its shape, or one value; got the"
            f" shapes {np.shape(a)}, {np.shape(mask)} and {np.shape(values)}"
        )
    _refuse_pending("np.putmask", a)
    if np.ndim(values) == 0:
        _checked(values, a)
    elif hasattr(values, "dtype") and not np.can_cast(values.dtype, a.dtype, "safe"):
        raise TypeError(f"Cannot cast array data from {values.dtype!r} to {a.dtype!r} according to the rule 'safe'")
    setitem(a, ..., np.where(mask, values, a).astype(a.dtype))
