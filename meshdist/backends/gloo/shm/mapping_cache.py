"""MappingCache: a peer's arrays, mapped into this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.gloo.shm.heap import Heap
from meshdist.backends.gloo.shm.segment import map_until_unused
from meshdist.errors import DistBackendError
from meshdist.system.platform import CLOSE_ON_EXEC

_COMMON = "shared memory"
# Mapped arrays of one peer to keep, the last used; they cost only page tables.
MOST_MAPPINGS = 64


class Place(NamedTuple):
    """Where a block is in the heap of a rank: in the array at `begin` of size `num_bytes`, `offset` bytes into it."""

    begin: int
    num_bytes: int
    offset: int


NOWHERE = Place(0, 0, 0)


class MappingCache:
    def __init__(self, pid: int, description: str) -> None:
        self._pid = pid
        self._description = description
        # By place in the heap, last used at the end. Places are not reused, so entries never become outdated.
        self._mapped: dict[int, Any] = {}
        self._lock = threading.Lock()  # calls of several groups may run at once

    def can_open(self, fd: int) -> bool:
        try:
            os.close(self._open(fd))
        except OSError:
            return False
        return True

    def view(self, fd: int, place: Place, dtype: np.dtype[Any], count: int) -> Array:
        """Return a block of `count` elements in the heap with descriptor `fd` as a flat array over the same memory."""
        with self._lock:
            memory = self._mapped.pop(place.begin, None)
            if memory is None:
                memory = self._map(fd, place)
                if len(self._mapped) == MOST_MAPPINGS:
                    del self._mapped[next(iter(self._mapped))]
            self._mapped[place.begin] = memory
        view: Array = np.ndarray((count,), dtype, memory, place.offset)
        return view

    def _map(self, fd: int, place: Place) -> Any:
        try:
            own = self._open(fd)
        except OSError as error:
            raise DistBackendError(
                f"cannot map an array in shared memory of {self._description}: {error}", peer_failed=True
            ) from error
        try:
            return map_until_unused(own, place.begin, place.num_bytes)
        finally:
            os.close(own)

    def _open(self, fd: int) -> int:
        return os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | CLOSE_ON_EXEC)


class SharedMemory:
    """The shared arrays of this rank, and the mapped ones of its peers; common to all its groups."""

    def __init__(self) -> None:
        self.heap = Heap()
        self._mappings: dict[int, MappingCache] = {}

    def mappings(self, pid: int, describe: Callable[[], str]) -> MappingCache:
        return self._mappings.get(pid) or self._mappings.setdefault(pid, MappingCache(pid, describe()))

    def close(self) -> None:
        self.heap.close()
        self._mappings.clear()


def shared_memory(options: BackendOptions) -> SharedMemory:
    memory = options.shared_resources.setdefault(_COMMON, SharedMemory())
    assert isinstance(memory, SharedMemory)
    return memory
