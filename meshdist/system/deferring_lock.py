"""Locks in which Ctrl-C waits while the main thread changes what must not be left halfway.

Python raises KeyboardInterrupt between any two instructions of the main thread: also behind a call that has taken bytes
out of a socket, and before they are counted. Inside the lock, the handler of SIGINT is one that remembers the signal,
which is handled when the lock is released.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any, Protocol

from meshdist import core

_SIGINT = int(signal.SIGINT)
# What `signal.signal` wraps: without the conversion to enums, which takes ten times as long.
_set_handler: Callable[[int, Any], Any] = import_module("_signal").signal


class Lock(Protocol):
    """A lock that the thread that holds it may take again."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *exc_info: object) -> None: ...


class _Deferral:
    """SIGINT, while the main thread is in sections that wait for it to come later; it may be in one within another."""

    def __init__(self) -> None:
        self._depth = 0
        self._has_come = False
        self._then: Any = signal.SIG_DFL  # the handler to come back

    def begin(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._has_come = False
        try:
            handler = _set_handler(_SIGINT, self._note)
        except BaseException:  # that of a signal that came before
            self._depth = 0
            raise
        if handler != self._note:  # which the handler of another signal, raising in `end`, may have left
            self._then = handler

    def end(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        _set_handler(_SIGINT, self._then)
        if self._has_come:
            self._has_come = False
            signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._has_come = True
        elif callable(self._then):
            self._then(number, frame)


_DEFERRAL = _Deferral()


def deferring_lock() -> Lock:
    """Return a lock in which Ctrl-C waits until the main thread has released it. Nothing may block in it."""
    if core.DeferringLock is None:
        return PlainDeferringLock()
    return core.DeferringLock(threading.main_thread().ident or 0)


class PlainDeferringLock:
    """What `deferring_lock` returns without the core."""

    __slots__ = ("_lock", "_main_thread")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # None if the handler is not Python's: it does not raise, and could not be set again.
        self._main_thread = None if signal.getsignal(signal.SIGINT) is None else threading.main_thread().ident

    def acquire(self, blocking: bool = True) -> bool:
        is_main = threading.get_ident() == self._main_thread
        if is_main:
            _DEFERRAL.begin()
        is_acquired = False
        try:
            is_acquired = self._lock.acquire(blocking)
        finally:
            if is_main and not is_acquired:
                _DEFERRAL.end()
        return is_acquired

    def release(self) -> None:
        self._lock.release()
        if threading.get_ident() == self._main_thread:
            _DEFERRAL.end()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()
