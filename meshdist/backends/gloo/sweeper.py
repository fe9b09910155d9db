"""The sweeper: gives back the memory of arrays that have died.

An array may die anywhere, in the middle of any call. What Python runs then must not take locks, and a Ctrl-C that comes
while it runs is lost: Python ignores what is raised there. So all that an array's death does is C code, which puts it
into a queue, and a thread takes it from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any

from meshdist.limits import start_thread

# Since Linux 2.6.16: give back the pages of a part of a file that is mapped.
_MADV_REMOVE = 9


class Extent:
    """Where one array lies.

    Attributes:
        begin: Its place in the file, in bytes.
        num_bytes: How many bytes it has, whole pages.
        address: Where this process has mapped it.
        alive: Whether the array, or a view of it, lives. It may not while this is still True, but then there is none at
            its address.
    """

    __slots__ = ("address", "alive", "begin", "num_bytes")

    def __init__(self, begin: int, num_bytes: int, address: int) -> None:
        self.begin = begin
        self.num_bytes = num_bytes
        self.address = address
        self.alive = True


class _Death(weakref.ref[Any]):
    __slots__ = ("extent",)

    extent: Extent


class Sweeper:
    """Gives back the memory of the arrays of one heap; its thread begins with the first of them."""

    def __init__(self) -> None:
        self._living: dict[int, _Death] = {}  # by place
        self._dead: SimpleQueue[_Death | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._owner = os.getpid()

    def begin(self) -> None:
        """Start the thread, if there is none.

        Raises:
            DistError: The system allows no more threads.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="meshdist-sweeper", daemon=True)
            start_thread(thread)
            self._thread = thread

    def watch(self, memory: Any, extent: Extent) -> None:
        """Give back what `extent` says when `memory`, the base of an array and all its views, dies."""
        death = _Death(memory, self._dead.put)
        death.extent = extent
        self._living[extent.begin] = death

    def sweep(self) -> None:
        """Give back now what has died."""
        with contextlib.suppress(Empty):
            while True:
                self._bury(self._dead.get_nowait())

    def close(self) -> None:
        """Have the thread end with the last array that lives; wait for it where there is none."""
        self._is_closed = True
        self._dead.put(None)
        if self._thread is not None and not self._living:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed or self._living:
            self._bury(self._dead.get())

    def _bury(self, death: _Death | None) -> None:
        if death is not None:
            with self._lock:
                _release(death.extent, self._owner)
                del self._living[death.extent.begin]


def _release(extent: Extent, owner: int) -> None:
    extent.alive = False
    libc = ctypes.CDLL(None)
    address, length = ctypes.c_void_p(extent.address), ctypes.c_size_t(extent.num_bytes)
    if os.getpid() == owner:  # a process that was forked has the mapping as well, but the pages are not its
        libc.madvise(address, length, _MADV_REMOVE)
    libc.munmap(address, length)
