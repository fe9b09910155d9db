"""Outcome: what a Work and a Future have in common: something that is done once, well or not, and waited for."""

from __future__ import annotations

import math
import threading
from _thread import allocate_lock
from collections.abc import Callable
from time import perf_counter_ns
from types import CodeType
from typing import Any, Protocol

from meshdist.deadline import Timeout, seconds
from meshdist.errors import DistError, DistTimeoutError

_SLICE_S = 0.05


class CarrierThread(threading.Thread):
    """A thread that carries out calls. What it does not go on with never ends, so it must not wait for any.

    Attributes:
        site: Returns where the call was made that it carries out just now: a function's code and the instruction in it.
    """

    site: Callable[[], tuple[CodeType | None, int]]


class Observer(Protocol):
    """Is told how long others wait for an Outcome, and when it is done."""

    def blocked(self, nanoseconds: int) -> None:
        """Note that somebody waited."""

    def done(self) -> None:
        """Note that it is done."""


class Outcome:
    """Done once, with a value or an error.

    Making one must cost nothing, so it has no lock: whoever waits hangs its own into `_watchers` and then looks once
    more, and whoever settles says so first and then looks for watchers. One of them sees the other.
    """

    __slots__ = ("_error", "_is_done", "_observer", "_value", "_watchers")

    def __init__(self) -> None:
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._watchers: list[Callable[[], object]] = []

    def settle(self, error: BaseException | None) -> None:
        """Mark as done; the value, where there is one, is in its place. For whoever carries it out."""
        self._error = error
        self._is_done = True
        while self._watchers:
            self._call_watcher()

    def watch(self, watcher: Callable[[], object]) -> None:
        """Have `watcher` called once this is done: at once where it is."""
        self._watchers.append(watcher)
        while self._is_done and self._watchers:
            self._call_watcher()

    def await_done(self, timeout: Timeout | None, what: str) -> None:
        """Block until this is done, well or not.

        Raises:
            DistTimeoutError: Not done in time.
            DistError: Called by the thread that would have to carry it out.
        """
        limit_s = math.inf if timeout is None else seconds(timeout)
        if not self.done_within(limit_s, what):
            raise DistTimeoutError(f"{what}: {not_yet(limit_s)}")

    def done_within(self, limit_s: float, what: str) -> bool:
        """Block until this is done, well or not, at most for `limit_s`; return whether it is.

        Raises:
            DistError: Called by the thread that would have to carry it out.
        """
        if self._is_done:
            return True
        if isinstance(threading.current_thread(), CarrierThread):
            raise DistError(
                f"{what}: a callback waits for it on the thread that has to carry it out, which would never end;"
                " chain another callback with then()"
            )
        lock = allocate_lock()
        lock.acquire()
        self.watch(lock.release)
        began_ns = perf_counter_ns()
        # In slices: a signal that comes right before this thread sleeps, or to another one, wakes nobody here.
        is_done = lock.acquire(True, min(limit_s, _SLICE_S))
        while not is_done and (left_s := limit_s - (perf_counter_ns() - began_ns) * 1e-9) > 0:
            is_done = lock.acquire(True, min(left_s, _SLICE_S))
        if hasattr(self, "_observer"):
            self._observer.blocked(perf_counter_ns() - began_ns)
        return is_done

    def observe(self, observer: Observer) -> None:
        """Have `observer` told of every wait that blocks from now on, and of the end."""
        self._observer = observer
        self.watch(observer.done)

    def _call_watcher(self) -> None:
        try:
            watcher = self._watchers.pop(0)
        except IndexError:  # another thread was faster
            return
        watcher()


def not_yet(limit_s: float, what_for: str = "") -> str:
    """Return what is said of a wait that can be repeated."""
    return f"not done after {limit_s:g} s{what_for}; the call goes on, wait again"
