"""Arrays in memory that the ranks of a group share, on which collectives are fastest."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.host import Array, check_dtype
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike
from meshdist.system.name_hints import explaining

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike


@explaining
def empty(shape: int | Sequence[int], dtype: DTypeLike = np.float64, group: GroupLike = None) -> Array:
    """Return a new uninitialized array in memory that the other ranks of this host read and write directly.

    If all ranks of a call pass such arrays, or contiguous views of them, nothing is copied in or out: from some hundred
    KiB on, all_reduce takes about two thirds of the time. Otherwise the call runs as with ordinary arrays.

    For NumPy it is an ordinary array; its copies and pickles are not shared. The memory is allocated when the array is
    created, not at the first write, and freed with its last view, even after `destroy_process_group`.

    This is not a collective call. On backends other than gloo, for ranks that are threads, for arrays of less than
    8 KiB, and if no shared memory is available (which is logged once), it returns `numpy.empty`.

    Args:
        shape: An integer, or one for each dim.
        dtype: Of its elements, as NumPy spells them.
        group: The group whose backend allocates it, a ProcessGroup or a DeviceMesh; the world if None. Other groups of
            the same world use the array in the same way.

    Returns:
        A C-contiguous `numpy.ndarray`, page-aligned if it is shared.

    Raises:
        TypeError: `shape` has other values than integers, or `dtype` is unsupported, such as objects and strings.
        ValueError: `shape` is negative, or there is no world yet.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     x = dist.empty((2, 3), "float32")
        ...     x[...] = dist.get_rank()
        ...     return dist.all_reduce(x).tolist()
        >>> dist.run(main, 2)[0]
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    return _make("empty", shape, dtype, group)


@explaining
def zeros(shape: int | Sequence[int], dtype: DTypeLike = np.float64, group: GroupLike = None) -> Array:
    """Return a new array of zeros, as `empty` does.

    Example:
        >>> import meshdist as dist
        >>> dist.run(lambda: dist.zeros(3).tolist(), 1)
        [[0.0, 0.0, 0.0]]
    """
    array = _make("zeros", shape, dtype, group)
    array.fill(0)
    return array


@explaining
def full(shape: int | Sequence[int], fill_value: Any, dtype: DTypeLike | None = None, group: GroupLike = None) -> Array:
    """Return a new array of one value, as `empty` does.

    Args:
        shape: An integer, or one for each dim.
        fill_value: A scalar, or an array that is broadcast.
        dtype: That of `fill_value` if None.
        group: The group whose backend allocates the memory, as for `empty`.

    Example:
        >>> import meshdist as dist
        >>> dist.run(lambda: dist.full(2, 7).tolist(), 1)
        [[7, 7]]
    """
    array = _make("full", shape, np.asarray(fill_value).dtype if dtype is None else dtype, group)
    array[...] = fill_value
    return array


def _make(name: str, shape: int | Sequence[int], dtype: DTypeLike, group: GroupLike) -> Array:
    members = resolve(group)
    error_prefix = members.error_prefix(name)
    kind = np.dtype(dtype)
    lengths = _lengths(error_prefix, shape)
    try:
        check_dtype(np.empty(0, kind), "dtype")
    except TypeError as error:
        raise TypeError(f"{error_prefix}: {error}") from None
    if members.rank() < 0:  # calls on such a group do nothing but warn
        return np.empty(lengths, kind)
    return members.usable_backend(error_prefix, np.empty(0, kind)).empty(lengths, kind)


def _lengths(error_prefix: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    given = shape if isinstance(shape, (tuple, list, np.ndarray)) else (shape,)
    try:
        lengths = tuple(map(index, given))
    except TypeError:
        raise TypeError(f"{error_prefix}: shape must be an integer or a sequence of integers, got {shape!r}") from None
    if any(length < 0 for length in lengths):
        raise ValueError(f"{error_prefix}: shape must not be negative, got {shape!r}")
    return lengths
