"""Turn Ctrl-C, SIGTERM and SIGHUP into events to wait for, instead of exceptions anywhere in the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Start processes in this block with SIGINT blocked until they call `worker.unblock_ctrl_c`.

    Otherwise each of them would print a traceback for a Ctrl-C during the start of its interpreter.
    """
    if sys.platform == "win32":
        yield
        return
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


class Interrupts:
    """Records the signals that ask the launcher to end. Use it in the main thread, as a context manager.

    A signal that was ignored when the launcher started (`nohup`) stays ignored.
    """

    NUMBERS = tuple(number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP"))

    def __init__(self) -> None:
        self._noted: list[signal.Signals] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._stack = contextlib.ExitStack()
        self._read_fd = -1

    def __enter__(self) -> Interrupts:
        self._read_fd, write_fd = os.pipe()
        for fd in (self._read_fd, write_fd):
            self._stack.callback(os.close, fd)
            if sys.platform != "win32":
                os.set_blocking(fd, False)
        self._stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False))
        for number in self.NUMBERS:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._note)
                self._stack.callback(signal.signal, number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable once a signal has arrived."""
        return self._read_fd

    def pending(self) -> bool:
        """Return True if a signal has arrived and `take` has not returned it yet."""
        return bool(self._noted)

    def take(self) -> list[signal.Signals]:
        """Return the signals that arrived since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        taken, self._noted = self._noted, []
        return taken

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(signal.Signals(number))
