"""Windows: the arrays of a peer's heap, mapped into this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.gloo.heap import Heap
from meshdist.backends.gloo.segment import map_for_good
from meshdist.errors import DistBackendError
from meshdist.systems import CLOSE_ON_EXEC

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

_COMMON = "shared memory"
# What is mapped costs no memory, but page tables; of one peer, the arrays used last are kept.
MOST_WINDOWS = 64


class Place(NamedTuple):
    """Where a block lies in the heap of a rank.

    Attributes:
        begin, num_bytes: Of the array that it is in: its place in the heap, and its size.
        offset: Where in the array the block begins, in bytes.
    """

    begin: int
    num_bytes: int
    offset: int


NOWHERE = Place(0, 0, 0)


class Windows:
    """The arrays of one peer.

    Args:
        pid: The peer's process.
        description: What messages call it.
    """

    def __init__(self, pid: int, description: str) -> None:
        self._pid = pid
        self._description = description
        # By place in the heap, the one used last at the end. A place is used once, so none of them is ever outdated.
        self._mapped: dict[int, Any] = {}
        self._lock = threading.Lock()  # groups may carry out calls at once

    def can_open(self, fd: int) -> bool:
        """Return whether this process may map what the peer has open as descriptor `fd`."""
        try:
            os.close(self._open(fd))
        except OSError:
            return False
        return True

    def view(self, fd: int, place: Place, dtype: np.dtype[Any], count: int) -> Array:
        """Return a block of the peer as a flat array over the same memory.

        Args:
            fd: The descriptor of the heap, in the peer.
            place: Where the block is.
            dtype: Of the elements.
            count: How many there are.

        Raises:
            DistBackendError: The peer's memory cannot be mapped.
        """
        with self._lock:
            memory = self._mapped.pop(place.begin, None)
            if memory is None:
                memory = self._map(fd, place)
                if len(self._mapped) == MOST_WINDOWS:
                    del self._mapped[next(iter(self._mapped))]
            self._mapped[place.begin] = memory
        view: Array = np.ndarray((count,), dtype, memory, place.offset)
        return view

    def _map(self, fd: int, place: Place) -> Any:
        try:
            own = self._open(fd)
        except OSError as error:
            raise DistBackendError(
                f"cannot map an array of {self._description} that is in shared memory: {error}", peer_failed=True
            ) from error
        try:
            return map_for_good(own, place.begin, place.num_bytes)
        finally:
            os.close(own)

    def _open(self, fd: int) -> int:
        return os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | CLOSE_ON_EXEC)


class SharedMemory:
    """The shared arrays of this rank, and those of its peers as far as it has seen them; one for all its groups.

    Attributes:
        heap: This rank's own.
    """

    def __init__(self) -> None:
        self.heap = Heap()
        self._windows: dict[int, Windows] = {}

    def windows(self, pid: int, describe: Callable[[], str]) -> Windows:
        """Return the windows to the process `pid` on this host; `describe` says what messages call it."""
        return self._windows.get(pid) or self._windows.setdefault(pid, Windows(pid, describe()))

    def close(self) -> None:
        """Give back all but this rank's arrays, which live on as long as they are looked at."""
        self.heap.close()
        self._windows.clear()


def shared_memory(options: BackendOptions) -> SharedMemory:
    """Return the shared arrays of this rank, which all its groups have in common."""
    memory = options.commons.setdefault(_COMMON, SharedMemory())
    assert isinstance(memory, SharedMemory)
    return memory
