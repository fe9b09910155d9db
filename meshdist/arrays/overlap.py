"""Overlap in memory: within an array, between the outputs of a call, and between inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def repeats_elements(array: Array) -> bool:
    """Return whether two elements of `array` share bytes, as in a broadcast array or a sliding window."""
    if array.size < 2:
        return False
    # Sufficient: from the shortest stride on, each exceeds the reach of all shorter ones together.
    steps = sorted((abs(step), size) for step, size in zip(array.strides, array.shape, strict=True) if size > 1)
    reach = array.itemsize
    for step, size in steps:
        if step < reach:
            break
        reach += step * (size - 1)
    else:
        return False
    # Not necessary, though: compare all offsets. Such arrays are rare.
    offsets = np.zeros(1, np.int64)
    for step, size in steps:
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    offsets.sort()
    return bool((np.diff(offsets) < array.itemsize).any())


def share_memory(one: Array, other: Array) -> bool:
    """Return whether an element of one array shares bytes with one of the other; two columns of an array do not."""
    return np.may_share_memory(one, other) and np.shares_memory(one, other)


def can_be_filled(array: Array) -> bool:
    """Return whether each element of `array` can be written, and has bytes of its own."""
    return array.flags.carray or (array.flags.writeable and not repeats_elements(array))


def shared_pair(arrays: Sequence[Array]) -> tuple[int, int] | None:
    """Return the indices of two arrays that share memory, or None."""
    pairs = ((i, j) for i, j in _near(arrays) if np.shares_memory(arrays[i], arrays[j]))
    return next(pairs, None)


def may_overlap(send: Any, recv: Any, apart: bool) -> bool:
    """Return False if no outputs share memory, True if they might, by a cheap test.

    With `apart`, inputs must not share memory with outputs either.
    """
    takes = recv if isinstance(recv, list) else [recv]
    gives: list[Array] = [] if not apart or send is None else send if isinstance(send, list) else [send]
    arrays = gives + takes
    if len(arrays) < 2 or _own_their_memory(arrays):
        return False
    # Inputs may share memory with each other.
    return any(j >= len(gives) for _, j in _near(arrays))


class KnownApart:
    """Remembers the arrays for which `may_overlap` was False: most calls repeat those of the previous call.

    The same array object has the same memory. The arrays of a call are remembered once they come twice in a row, and as
    long as all of them live. With `apart`, inputs must not share memory with outputs either.
    """

    def __init__(self, apart: bool) -> None:
        self._apart = apart
        self._known: list[int] | None = None
        self._last: list[int] | None = None
        self._arrays: list[ref[Array]] = []

    def may_overlap(self, send: Any, recv: Any) -> bool:
        arrays = recv if type(recv) is list else [recv]
        if self._apart and send is not None:
            arrays = arrays + send if type(send) is list else [*arrays, send]
        ids = [*map(id, arrays)]
        if ids == self._known:
            return False
        if may_overlap(send, recv, self._apart):
            return True
        if ids == self._last:
            self._known = None
            self._arrays = [ref(array, self._forget) for array in arrays]
            self._known = ids
        self._last = ids
        return False

    def _forget(self, dead: ref[Array]) -> None:
        # A new array may get its id.
        self._known = self._last = None


def _own_their_memory(arrays: Sequence[Array]) -> bool:
    for array in arrays:
        if array.base is not None:
            return False
    return len(set(map(id, arrays))) == len(arrays)


def must_copy(send: Array | list[Array], recv: Array | list[Array], rank: int, size: int, reduces: bool) -> bool:
    """Return whether the input must be copied, because receiving overwrites it before it is sent.

    A rank's own block may lie in place in the output, as in `all_gather_into_tensor(out, out[rank])`, or the output of
    a scatter be its own block: there, the call writes the same elements. With `reduces`, it does not.
    """
    gives = send if isinstance(send, list) else [send]
    takes = recv if isinstance(recv, list) else [recv]
    arrays, first_take = [*gives, *takes], len(gives)
    pairs = [(i, j - first_take) for i, j in _near(arrays) if i < first_take <= j]
    if not pairs:
        return False
    own = None if reduces else _own_block(send, recv, rank, size)
    return any(np.shares_memory(gives[i], takes[j]) for i, j in pairs if (i, j) != own)


def _near(arrays: Sequence[Array]) -> Iterator[tuple[int, int]]:
    # All pairs of indices whose extents overlap, in order. They need not share memory: columns.
    if len(arrays) <= 4:  # trying all pairs is faster
        yield from ((i, j) for j in range(len(arrays)) for i in range(j) if np.may_share_memory(arrays[i], arrays[j]))
        return
    spans = sorted((*_span(array), place) for place, array in enumerate(arrays) if array.size)
    reaching: list[tuple[int, int]] = []
    for begin, end, place in spans:
        reaching = [(other_end, other) for other_end, other in reaching if other_end > begin]
        yield from ((min(other, place), max(other, place)) for _, other in reaching)
        reaching.append((end, place))


def _own_block(send: Array | list[Array], recv: Array | list[Array], rank: int, size: int) -> tuple[int, int] | None:
    # The indices in `send` and `recv` of this rank's own block, if it is in place.
    if isinstance(send, list):
        scattered = not isinstance(recv, list) and len(send) == size and _same_place(send[rank], recv)
        return (rank, 0) if scattered else None
    if isinstance(recv, list):
        return (0, rank) if len(recv) == size and _same_place(send, recv[rank]) else None
    if recv.size != size * send.size or not (recv.flags.c_contiguous and send.flags.c_contiguous):
        return None
    return (0, 0) if _address(send) == _address(recv) + rank * send.nbytes else None


def _same_place(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.strides == other.strides and _address(one) == _address(other)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _span(array: Array) -> tuple[int, int]:
    begin = end = _address(array)
    for step, size in zip(array.strides, array.shape, strict=True):
        if step < 0:
            begin += step * (size - 1)
        else:
            end += step * (size - 1)
    return begin, end + array.itemsize
