"""Reclaimer: frees the memory of arrays that have died.

An array may die within any call. Python code that runs then must not take locks, and a Ctrl-C that arrives in it is
lost, as Python ignores exceptions raised there. So the death of an array runs only C code, which puts it into a queue;
a thread reads the queue.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any

from meshdist.system.platform import start_thread

# Since Linux 2.6.16: free the pages behind a part of a mapped file.
_MADV_REMOVE = 9


class Extent:
    """The pages of one array; `alive` may still be True for a moment after the last view has died."""

    __slots__ = ("address", "alive", "begin", "num_bytes")

    def __init__(self, begin: int, num_bytes: int, address: int) -> None:
        self.begin = begin
        self.num_bytes = num_bytes
        self.address = address
        self.alive = True


class _DeadRef(weakref.ref[Any]):
    __slots__ = ("extent",)

    extent: Extent


class Reclaimer:
    """Frees the arrays of one heap; its thread starts with the first of them."""

    def __init__(self) -> None:
        self._living: dict[int, _DeadRef] = {}  # by place
        self._dead: SimpleQueue[_DeadRef | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._owner = os.getpid()

    def begin(self) -> None:
        """Start the thread, if it does not run; raise DistError if the system allows no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="meshdist-reclaimer", daemon=True)
            start_thread(thread)
            self._thread = thread

    def watch(self, memory: Any, extent: Extent) -> None:
        """Free `extent` when `memory`, the base of an array and all its views, dies."""
        death = _DeadRef(memory, self._dead.put)
        death.extent = extent
        self._living[extent.begin] = death

    def reclaim(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._free(self._dead.get_nowait())

    def close(self) -> None:
        """Have the thread end with the last living array; wait for it if there is none."""
        self._is_closed = True
        self._dead.put(None)
        if self._thread is not None and not self._living:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed or self._living:
            self._free(self._dead.get())

    def _free(self, death: _DeadRef | None) -> None:
        if death is not None:
            with self._lock:
                _release(death.extent, self._owner)
                del self._living[death.extent.begin]


def _release(extent: Extent, owner: int) -> None:
    extent.alive = False
    libc = ctypes.CDLL(None)
    address, length = ctypes.c_void_p(extent.address), ctypes.c_size_t(extent.num_bytes)
    if os.getpid() == owner:  # a forked child has the mapping as well, but the pages belong to its parent
        libc.madvise(address, length, _MADV_REMOVE)
    libc.munmap(address, length)
