"""The heap: a rank's arrays in shared memory, that its peers can map.

It is one anonymous file (memfd) for each rank, that grows with every array and gives the pages of an array back when
its last view dies. A place in the file is never used twice, so a place says for ever which array is meant, and what a
peer has mapped can never become another array.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from bisect import bisect_right
from math import prod
from typing import Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.gloo.segment import anonymous_file, map_shared, populate
from meshdist.backends.gloo.sweeper import Extent, Sweeper
from meshdist.debug.log import RankLog
from meshdist.errors import DistBackendError, DistError

# Smaller arrays go through the slots in one step, wherever they are.
SMALLEST_BYTES = 8 << 10
# Every array is a mapping of its own, and the kernel lets a process have some 65,000.
MOST_ARRAYS = 16 << 10


class Heap:
    """The arrays of one rank in shared memory.

    Attributes:
        fd: The descriptor of the file, through which peers find it; None as long as there is no array.
        in_use: Whether there was an array of late; False where nothing can be found.

    Example:
        >>> heap = Heap()
        >>> array = heap.empty((1000, 1000), np.dtype(np.float32))
        >>> extent = heap.find(array[10:].__array_interface__["data"][0])
        >>> del array
        >>> heap.close()
    """

    def __init__(self) -> None:
        self.fd: int | None = None
        self.in_use = False
        self._end = mmap.PAGESIZE  # so that no array is at place 0, which stands for none
        self._lock = threading.Lock()
        # By address, with their addresses; replaced, never changed: it is read without the lock.
        self._index: tuple[list[int], list[Extent]] = [], []
        self._has_said = False
        self._is_closed = False
        self._sweeper = Sweeper()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array in shared memory, or, where there is none to be had, in this process's own."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < SMALLEST_BYTES or self._is_closed:
            return np.empty(shape, dtype)
        try:
            memory = self._allocate(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except (OSError, DistError) as error:
            self.say_once(f"no shared memory for an array of {num_bytes} bytes: {error}")
            return np.empty(shape, dtype)
        array: Array = np.ndarray(shape, dtype, memory)
        return array

    def find(self, address: int) -> Extent | None:
        """Return the array that is at an address of this process; None where it is no array of this heap."""
        addresses, extents = self._index
        place = bisect_right(addresses, address) - 1
        if place < 0:
            return None
        extent = extents[place]
        return extent if extent.alive and address < extent.address + extent.num_bytes else None

    def say_once(self, what: str) -> None:
        """Log that arrays are not shared, the first time; the calls on them are slower, and as right."""
        if not self._has_said:
            self._has_said = True
            RankLog().warning("%s; they are ordinary arrays, and collectives on them copy more", what)

    def close(self) -> None:
        """Give back what is not an array's: peers find the heap no more. Arrays live on, as long as their views do."""
        with self._lock:
            self._is_closed = True
            self.in_use = False
            self._index = [], []
            if self.fd is not None:
                os.close(self.fd)
                self.fd = None
        self._sweeper.close()

    def _allocate(self, num_bytes: int) -> Any:
        with self._lock:
            self._sweeper.sweep()  # what has just died makes room
            extents = [extent for extent in self._index[1] if extent.alive]
            if len(extents) >= MOST_ARRAYS:
                raise DistBackendError(f"there are {MOST_ARRAYS} already")
            if self.fd is None:
                self.fd = _new_file()
            self._sweeper.begin()
            begin = self._end
            self._end = begin + num_bytes  # at once: a call that is interrupted keeps its place from the next one
            os.ftruncate(self.fd, self._end)
            memory, address = map_shared(self.fd, begin, num_bytes)
            extent = Extent(begin, num_bytes, address)
            self._sweeper.watch(memory, extent)
            _reserve(self.fd, memory, extent)
            extents = sorted([*extents, extent], key=lambda extent: extent.address)
            self._index = [extent.address for extent in extents], extents
            self.in_use = True
            return memory


def _new_file() -> int:
    fd = anonymous_file("meshdist-arrays")
    if fd is None:
        raise DistBackendError("this system has no memfd_create, or refuses it")
    return fd


def _reserve(fd: int, memory: Any, extent: Extent) -> None:
    # Without pages behind it, an array would end the process with SIGBUS when they are needed and not there.
    problem = populate(memory, 0, extent.num_bytes)
    if sys.platform == "linux" and problem == errno.EINVAL:
        os.posix_fallocate(fd, extent.begin, extent.num_bytes)
    elif problem:
        raise OSError(problem, os.strerror(problem))
