"""Indexing of DTensors, `x[key]`, and NumPy's functions that take elements by indices or a mask, or find indices."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.array_reductions import reduced_dims
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_arrays import checked_indices, gathered, masked, without_masks
from meshdist.tensor.index_keys import FULL, Entry, along, fancy, is_array, is_mask, normalized, parsed, remembered_key
from meshdist.tensor.index_parts import taken, taken_before, uncut, view_layout
from meshdist.tensor.index_space import moved_by_others
from meshdist.tensor.known_calls import localizes
from meshdist.tensor.operands import aligned, as_operand, checked_out, layout_of, mesh_of, resolved, written

_numpy: Any = np  # whose stubs do not know of DTensors


@implements("__getitem__")
def getitem(x: DTensor, key: Any) -> DTensor:
    """Return `x[key]`."""
    known = remembered_key(key)
    if known is not None:
        layout = view_layout(x._layout, known)
        if layout is not None:
            return wrap(x._local[key], layout, x._mesh, x._origin)
        result = taken_before(x, known)
        if result is not None:
            return result
    entries = parsed(key, x.shape)
    if not any(map(is_array, entries)):
        return taken(x, entries, known)
    return _indexed(x, entries)


def _indexed(x: DTensor, entries: list[Entry]) -> DTensor:
    parts = fancy(entries)
    first = taken(x, parts.first)
    (array, *more), (dim, *_) = parts.arrays, parts.dims
    if array.ndim == 0:
        rows = slice(0, int(bool(array)))
        return np.copy(taken(first, [*[FULL] * dim, rows, *[FULL] * (first.ndim - dim - 1)]))  # type: ignore[return-value]
    if is_mask(array) and not more:
        result, place, width = masked(first, dim, array), dim, 1
    else:
        result, place, width = gathered(first, *without_masks("x[key]", parts))
    if parts.in_front and place:
        result = _numpy.moveaxis(result, range(place, place + width), range(width))
    return result


@implements(np.take)
def take(a: Any, indices: Any, axis: int | None = None, out: Any = None, mode: str = "raise") -> Any:
    """Return the elements at `indices` along a dimension; see `numpy.take`."""
    if not isinstance(a, DTensor):
        whole = np.asarray(a) if not hasattr(a, "ndim") else a
        a = wrap(array_module(out.mesh).asarray(whole), layout_of(whole, out.mesh), out.mesh)
    if axis is None or a.ndim == 0:
        a, axis = np.reshape(a, -1), 0 if axis is None else axis
    axis = normalized(axis, a.ndim)
    rows = a.shape[axis]
    if not hasattr(indices, "ndim"):
        indices = np.asarray(indices, None if np.size(indices) else np.intp)
    if mode not in ("raise", "wrap", "clip"):
        raise ValueError(f"clipmode must be one of 'clip', 'raise', or 'wrap' (got '{mode}')")
    if indices.dtype.kind == "b":
        indices = indices.astype(np.intp)
    if mode != "raise" and rows:
        indices = indices % rows if mode == "wrap" else np.clip(indices, 0, rows - 1)
    others = (*a.shape[:axis], *a.shape[axis + 1 :])
    if 0 not in (a.shape[:axis] if rows or mode == "raise" else others):
        taken = getitem(a, along(axis, indices))
    else:  # NumPy takes any index where the dimensions before leave no elements; in another mode, also those behind
        indices = np.asarray(indices)
        cuts = a.layout.cuts
        layout = ArrayLayout.of_cuts(
            (*others[:axis], *indices.shape, *others[axis:]),
            a.mesh.shape,
            (*cuts[:axis], *(None,) * indices.ndim, *cuts[axis + 1 :]),
            {},
        )
        taken = wrap(array_module(a.mesh).empty(layout.local_shape(coordinate_in(a.mesh)), a.dtype), layout, a.mesh)
    out = checked_out("np.take", out, taken.shape)
    if out is not None and not np.can_cast(out.dtype, taken.dtype, "safe"):  # NumPy asks for this direction
        raise TypeError(f"np.take: cannot cast the {out.dtype} of out= to {taken.dtype} according to the rule 'safe'")
    return written("np.take", taken, out, "unsafe")


@localizes(np.take)
def _taken_alike(result: DTensor, a: Any, indices: Any, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(a, DTensor) or axis is None or not a.ndim or a.layout.cuts[axis] is not None:
        return None
    if not a.shape[axis]:  # of no rows, NumPy's mode "wrap" counts for ever
        return None
    return None if isinstance(indices, DTensor) else np.take


@implements(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> DTensor:
    """Return the elements at `indices` along a dimension, row by row; see `numpy.take_along_axis`."""
    if axis is None:
        if np.ndim(indices) != 1:
            raise ValueError("when axis=None, `indices` must have a single dimension.")
        arr, axis = np.reshape(arr, -1), 0
    axis = normalized(axis, arr.ndim)
    if indices.dtype.kind not in "iu":
        raise IndexError("`indices` must be an integer array")
    if arr.ndim != indices.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")
    if isinstance(arr, DTensor):
        block, layout = uncut("np.take_along_axis", arr, [axis], f"it takes rows of dimension {axis}")
        arr = wrap(block, layout, arr.mesh, arr._origin)
    shapes = [list(arr.shape), list(indices.shape)]
    shapes[0][axis] = 1
    try:
        shape = np.broadcast_shapes(*map(tuple, shapes))
    except ValueError as error:
        raise IndexError(f"shape mismatch: {error}") from None
    if 0 not in shape:  # as NumPy, which looks at no index where nothing is taken
        checked_indices(arr.shape, [axis], [indices])
    labels = [("rows" if dim == axis else dim for dim in range(arr.ndim)), range(arr.ndim)]
    what = ("arr", "indices")
    blocks, alignment, mesh = aligned(
        "np.take_along_axis", [arr, indices], list(map(tuple, labels)), moved_by_others, what
    )
    layout = ArrayLayout.of_cuts(shape, mesh.shape, alignment.cuts_of(range(arr.ndim)), alignment.pending)
    return wrap(_numpy.take_along_axis(*blocks, axis), layout, mesh)


# ---- Where arrays are not zero, and the elements at a mask


def _rows(a: DTensor, dim: int) -> DTensor:
    """Return for each element its row of dimension `dim`; it takes no memory but that of one line."""
    module, layout = array_module(a.mesh), a.layout.resolved()
    held = layout.index(coordinate_in(a.mesh))[dim]
    line = module.arange(held.start, held.stop).reshape([-1 if at == dim else 1 for at in range(a.ndim)])
    return wrap(module.broadcast_to(line, a.to_local().shape), layout, a.mesh)


@implements(np.nonzero)
def nonzero(a: DTensor) -> tuple[DTensor, ...]:
    """Return the indices of the elements that are not zero, an array for each dimension; see `numpy.nonzero`."""
    if not a.ndim:
        raise ValueError("Calling nonzero on 0d arrays is not allowed. Use np.atleast_1d(scalar).nonzero() instead.")
    mask = resolved(cast(DTensor, np.not_equal(cast(Any, a), 0)))
    return tuple(_rows(a, dim)[mask] for dim in range(a.ndim))


@implements(np.flatnonzero)
def flatnonzero(a: DTensor) -> DTensor:
    """Return the indices of the elements that are not zero in the flat array; see `numpy.flatnonzero`."""
    return nonzero(cast(DTensor, np.ravel(cast(Any, a))))[0]


@implements(np.argwhere)
def argwhere(a: DTensor) -> DTensor:
    """Return the indices of the elements that are not zero, a row for each; see `numpy.argwhere`."""
    if not a.ndim:  # as many rows as there are such elements, without a column
        return cast(DTensor, argwhere(cast(DTensor, np.atleast_1d(cast(Any, a))))[:, :0])
    return cast(DTensor, np.stack(cast(Any, nonzero(a)), axis=1))


@implements(np.extract)
def extract(condition: Any, arr: Any) -> DTensor:
    """Return the elements where a condition is true; see `numpy.extract`."""
    mesh = mesh_of("np.extract", (condition, arr))
    mask, array = (as_operand("np.extract", x, mesh) for x in (condition, arr))
    if mask.shape != array.shape:
        raise IndexError(f"np.extract: the condition must have the shape {array.shape} of the array, got {mask.shape}")
    return cast(DTensor, array[cast(Any, mask) != 0] if array.ndim else np.ravel(cast(Any, array))[np.ravel(mask) != 0])


@implements(np.compress)
def compress(condition: Any, a: DTensor, axis: int | None = None) -> DTensor:
    """Return the rows where a condition is true, which may be shorter than the dimension; see `numpy.compress`."""
    if axis is None or not a.ndim:
        a, axis = cast(DTensor, np.ravel(cast(Any, a))), 0 if axis is None else axis
    (dim,) = reduced_dims(a.ndim, axis)
    if np.ndim(condition) != 1:
        raise ValueError("condition must be a 1-d array")
    if isinstance(condition, DTensor):
        condition = condition.full()
    return cast(DTensor, np.take(cast(Any, a), np.flatnonzero(condition), dim))
