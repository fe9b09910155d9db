"""Heap: a rank's arrays in shared memory, which its peers can map.

Each rank has one anonymous file (memfd) that grows with every array; the pages of an array are freed when its last view
dies. A place in the file is never reused, so a place identifies one array, and a peer's mapping never shows another.
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

from meshdist.arrays.host import Array
from meshdist.backends.gloo.shm.reclaimer import Extent, Reclaimer
from meshdist.backends.gloo.shm.segment import anonymous_file, map_shared, populate
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.log import RankLog

# Smaller arrays go through the slots in one step wherever they are.
SMALLEST_BYTES = 8 << 10
# Every array is a mapping of its own, and Linux allows a process some 65,000.
MOST_ARRAYS = 16 << 10


class Heap:
    """The arrays of one rank in shared memory; peers open the file through `fd`, None before the first array."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self.in_use = False
        self._end = mmap.PAGESIZE  # no array is at place 0, which means none
        self._lock = threading.Lock()
        # Extents with their addresses, sorted by address. Replaced, never changed: read without the lock.
        self._index: tuple[list[int], list[Extent]] = [], []
        self._has_said = False
        self._is_closed = False
        self._reclaimer = Reclaimer()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array in shared memory, or in private memory if there is none."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < SMALLEST_BYTES or self._is_closed:
            return np.empty(shape, dtype)
        try:
            memory = self._allocate(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except (OSError, DistError) as error:
            self.warn_once(f"no shared memory for an array of {num_bytes} bytes: {error}")
            return np.empty(shape, dtype)
        array: Array = np.ndarray(shape, dtype, memory)
        return array

    def find(self, address: int) -> Extent | None:
        addresses, extents = self._index
        place = bisect_right(addresses, address) - 1
        if place < 0:
            return None
        extent = extents[place]
        return extent if extent.alive and address < extent.address + extent.num_bytes else None

    def warn_once(self, what: str) -> None:
        """Warn, once, that arrays are not shared; calls on them are correct but slower."""
        if not self._has_said:
            self._has_said = True
            RankLog().warning("%s; they are ordinary arrays, and collectives on them copy more", what)

    def close(self) -> None:
        """Close the file: peers can no longer open it. Arrays live as long as their views."""
        with self._lock:
            self._is_closed = True
            self.in_use = False
            self._index = [], []
            if self.fd is not None:
                os.close(self.fd)
                self.fd = None
        self._reclaimer.close()

    def _allocate(self, num_bytes: int) -> Any:
        with self._lock:
            self._reclaimer.reclaim()  # make room
            extents = [extent for extent in self._index[1] if extent.alive]
            if len(extents) >= MOST_ARRAYS:
                raise DistBackendError(f"there are {MOST_ARRAYS} already")
            if self.fd is None:
                self.fd = _new_file()
            self._reclaimer.begin()
            begin = self._end
            self._end = begin + num_bytes  # at once: an interrupted call must not leave its place to the next one
            os.ftruncate(self.fd, self._end)
            memory, address = map_shared(self.fd, begin, num_bytes)
            extent = Extent(begin, num_bytes, address)
            self._reclaimer.watch(memory, extent)
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
    # Without pages behind it, the array would end the process with SIGBUS when it is written.
    problem = populate(memory, 0, extent.num_bytes)
    if sys.platform == "linux" and problem == errno.EINVAL:
        os.posix_fallocate(fd, extent.begin, extent.num_bytes)
    elif problem:
        raise OSError(problem, os.strerror(problem))
