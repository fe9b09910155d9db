"""Keys of `x[key]`: checked as NumPy checks them, and taken apart. No blocks, no messages."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

FULL = slice(None)
# An integer, a slice, None, or an array of integers or booleans.
Entry: TypeAlias = Any
_AxisError: Any = getattr(np, "exceptions", np).AxisError


def along(dim: int, entry: Entry) -> tuple[Entry, ...]:
    """Return the key that indexes dimension `dim` by `entry`, and the dimensions before it in full."""
    return (*(FULL,) * dim, entry)


def remembered_key(key: Any) -> tuple[Any, ...] | None:
    """Return a key of integers, slices, None and Ellipsis in a form that can be hashed; of another, None."""
    if type(key) is not tuple:
        key = (key,)
    parts: list[Any] = []
    for entry in key:
        kind = type(entry)
        if kind is slice:
            start, stop, step = entry.start, entry.stop, entry.step
            if not (
                (start is None or type(start) is int)
                and (stop is None or type(stop) is int)
                and (step is None or type(step) is int)
            ):
                return None
            parts.append((start, stop, step))
        elif kind is int or entry is None or entry is Ellipsis:
            parts.append(entry)
        else:
            return None
    return tuple(parts)


def is_array(entry: Entry) -> bool:
    return entry is not None and not isinstance(entry, (int, slice))


def is_mask(entry: Entry) -> bool:
    return is_array(entry) and entry.dtype.kind == "b"


def parsed(key: Any, shape: tuple[int, ...]) -> list[Entry]:
    """Return the entries of a key that index all dimensions of an array; raise as NumPy does for bad ones."""
    entries = [_entry(entry) for entry in (key if isinstance(key, tuple) else (key,))]
    ellipses = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    used = sum(dims_of(entry) for entry in entries)
    if used > len(shape):
        raise IndexError(f"too many indices for array: array is {len(shape)}-dimensional, but {used} were indexed")
    place = ellipses[0] if ellipses else len(entries)
    entries[place : place + 1] = [FULL] * (len(shape) - used)
    dim = 0
    for place, entry in enumerate(entries):
        if isinstance(entry, int):
            entries[place] = checked_index(entry, dim, shape[dim])
        elif is_mask(entry) and entry.shape != shape[dim : dim + entry.ndim]:
            axis = next(at for at, rows in enumerate(entry.shape, dim) if rows != shape[at])
            raise IndexError(
                f"boolean index did not match indexed array along axis {axis}; size of axis is {shape[axis]} but size"
                f" of corresponding boolean axis is {entry.shape[axis - dim]}"
            )
        dim += dims_of(entry)
    return entries


def dims_of(entry: Entry) -> int:
    """Return how many dimensions of the array an entry of a key indexes."""
    if entry is None or entry is Ellipsis:
        return 0
    return int(entry.ndim) if is_mask(entry) else 1


def _entry(entry: Any) -> Entry:
    if entry is None or entry is Ellipsis or isinstance(entry, slice):
        return entry
    if isinstance(entry, (bool, np.bool_)):
        return np.asarray(entry)
    if not hasattr(entry, "ndim") and hasattr(entry, "__index__"):
        return operator.index(entry)
    if isinstance(entry, (list, tuple)):
        entry = np.asarray(entry) if len(entry) else np.zeros(0, np.intp)
    if not hasattr(entry, "dtype"):
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`), numpy.newaxis (`None`) and integer or boolean arrays are"
            f" valid indices, got {entry!r}"
        )
    if entry.dtype.kind not in "biu":
        raise IndexError(f"arrays used as indices must be of integer (or boolean) type, got {entry.dtype}")
    if entry.dtype.kind != "b" and entry.ndim == 0:
        return int(entry)
    return entry


def checked_index(index: int, dim: int, rows: int) -> int:
    if not -rows <= index < rows:
        raise IndexError(f"index {index} is out of bounds for axis {dim} with size {rows}")
    return index % rows


class Fancy(NamedTuple):
    """A key with arrays, taken apart: what is done first, and the arrays that index the result of it.

    Attributes:
        first: The key without arrays, which take all of their dimensions.
        arrays: The arrays.
        dims: The dimension of the result of `first` that each array indexes, or for a mask the first of them.
        in_front: Whether NumPy puts the dimensions of the arrays first, since there is something between them.
    """

    first: list[Entry]
    arrays: list[Any]
    dims: list[int]
    in_front: bool


def fancy(entries: Sequence[Entry]) -> Fancy:
    first: list[Entry] = []
    dims: list[int] = []
    places = [place for place, entry in enumerate(entries) if is_array(entry) or isinstance(entry, int)]
    dim = 0
    for entry in entries:
        if is_array(entry):
            dims.append(dim)
            first += [FULL] * dims_of(entry) if dims_of(entry) else [None]
            dim += dims_of(entry) or 1
        else:
            first.append(entry)
            dim += not isinstance(entry, int)
    arrays = list(filter(is_array, entries))
    if any(array.ndim == 0 for array in arrays) and len(places) > 1:
        raise TypeError("x[key]: True and False are not valid indices of DTensors beside integers and arrays")
    return Fancy(first, arrays, dims, places[-1] - places[0] >= len(places))


def normalized(axis: Any, ndim: int) -> int:
    """Return a dimension counted from the first; raise numpy's AxisError for one that an array lacks."""
    axis = int(operator.index(axis))
    if not -ndim <= axis < ndim:
        raise _AxisError(axis, ndim)
    return int(axis % ndim)
