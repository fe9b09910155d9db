"""Scratch memory for messages, which is used again."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np

from meshdist.arrays.device_types import new_empty

_LEAST_KEPT = 1 << 16  # the allocator itself keeps less than this
_MOST_KEPT = 1 << 27
_buffers: list[Any] = []  # free ones, the last used at the end


class Scratch:
    """An array for a message, as a context: its memory is used again, since the system clears fresh memory.

    That takes longer than the copy into it. Threads share the buffers. After an error, a peer may still use the memory:
    it is not used again.

    Args:
        shape: The shape of the array.
        like: A NumPy or CuPy array, to whose device it belongs.
        dtype: None for that of `like`.
    """

    __slots__ = ("_buffer", "array")

    def __init__(self, shape: tuple[int, ...], like: Any, dtype: np.dtype[Any] | None = None) -> None:
        self._buffer = None
        dtype = dtype or like.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        if type(like) is not np.ndarray or not _LEAST_KEPT <= nbytes <= _MOST_KEPT:
            self.array = new_empty(shape, like) if dtype == like.dtype else np.empty(shape, dtype)
            return
        self._buffer = _kept_buffer(nbytes)
        if self._buffer is None:
            self._buffer = np.empty(nbytes, np.uint8)
        self.array = self._buffer[:nbytes].view(dtype).reshape(shape)

    def __enter__(self) -> Any:
        return self.array

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.release()

    def release(self) -> None:
        """Allow the memory to be used again."""
        if self._buffer is not None:
            _buffers.append(self._buffer)
            self._buffer = None
            with suppress(IndexError):  # another thread took one
                while sum(buffer.nbytes for buffer in list(_buffers)) > _MOST_KEPT:
                    del _buffers[0]


def _kept_buffer(nbytes: int) -> Any:
    """Take a free buffer of up to twice this size; None if there is none."""
    for at, buffer in enumerate(list(_buffers)):
        if nbytes <= buffer.nbytes <= 2 * nbytes:
            with suppress(IndexError):  # another thread took one
                taken = _buffers.pop(at)
                if taken.nbytes >= nbytes:
                    return taken
            return None
    return None
