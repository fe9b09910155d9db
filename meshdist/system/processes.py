"""Watch other processes: whether they are alive, and how they ended."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from meshdist.system.platform import limit_of

# PIDFD_GET_INFO of <linux/pidfd.h>: the exit status of a process, also after its parent has collected it.
_GET_INFO, _INFO_BYTES, _INFO_EXIT = 0xC040FF0B, 64, 1 << 3
# Its place in the answer.
_EXIT_CODE = slice(60, 64)
# Fields 22 and 52 of /proc/<pid>/stat, counted from the state.
_STARTED, _CODE = 19, 49


def started_at(pid: int) -> int:
    """Return when process `pid` started, in clock ticks since boot; 0 if there is no such process, or no /proc."""
    fields = fields_of(pid)
    # A zombie has ended; its parent has not collected its exit status.
    return 0 if not fields or fields[0] in "ZX" else int(fields[_STARTED])


def fields_of(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; empty if there is no such process, or no /proc."""
    try:
        # The second field, the name, is in parentheses and may hold anything.
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError as error:
        if limit_of(error):
            raise  # the process may be alive
        return []


class ProcessWatch:
    """Watches whether one process is alive, by pidfd if the system has them, and how it ended."""

    def __init__(self, pid: int, started: int) -> None:
        self._pid, self._started = pid, started
        self._fd: int | None = None
        self._ended = False
        if sys.platform == "linux" and hasattr(os, "pidfd_open"):
            try:
                self._fd = os.pidfd_open(self._pid)
            except ProcessLookupError:
                self._ended = True
            except OSError:
                self._fd = None  # forbidden, for example by a sandbox; /proc and signals are used instead
        # The pid may have been given to another process before the pidfd was opened.
        if started and started_at(self._pid) != started:
            self._ended = True

    def ended(self) -> bool:
        if self._ended:
            return True
        if sys.platform != "win32" and self._fd is not None:
            poll = select.poll()  # one per call, since another thread may poll at the same time
            poll.register(self._fd, select.POLLIN)
            self._ended = bool(poll.poll(0))
        else:
            self._ended = started_at(self._pid) != self._started if self._started else self._unsignalled()
        return self._ended

    def status(self) -> int | None:
        """Return the exit status of the process: minus the number of a signal that killed it, None if unknown.

        The kernel keeps it until the parent has collected it; since Linux 6.15 longer.
        """
        code = self._code_of_zombie()
        if code is None:
            code = self._code_by_pidfd()
        return None if code is None else os.waitstatus_to_exitcode(code)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _code_of_zombie(self) -> int | None:
        fields = fields_of(self._pid)
        if len(fields) <= _CODE or fields[0] != "Z" or int(fields[_STARTED]) != self._started:
            return None
        # Without permission the field is 0.
        return int(fields[_CODE]) or (0 if self._is_ours() else None)

    def _is_ours(self) -> bool:
        """Whether the process belongs to this user."""
        if sys.platform == "win32":
            return False
        with suppress(OSError):
            return os.stat(f"/proc/{self._pid}").st_uid == os.geteuid()
        return False

    def _code_by_pidfd(self) -> int | None:
        if sys.platform != "linux" or self._fd is None:
            return None
        import fcntl  # missing on Windows

        info = bytearray(_INFO_BYTES)
        info[:8] = _INFO_EXIT.to_bytes(8, sys.byteorder)
        with suppress(OSError):  # an older kernel
            fcntl.ioctl(self._fd, _GET_INFO, info)
            if int.from_bytes(info[:8], sys.byteorder) & _INFO_EXIT:
                return int.from_bytes(info[_EXIT_CODE], sys.byteorder, signed=True)
        return None

    def _unsignalled(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        return False


INTERRUPT_BASE = 128
# The signals of a crash in native code.
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


def describe_status(status: int) -> str:
    """Return how a process ended, from its exit status: minus the number of a signal."""
    if status < 0:
        return f"was killed by {signal_name(-status)}"
    return f"exited with status {status}"


def hint_about(status: int) -> str:
    """Return what a user can do about a process that was killed by a signal which the user did not send; else empty."""
    return "" if status >= 0 else hint_about_signal(signal_name(-status))


def hint_about_signal(name: str) -> str:
    """Return the same for the name of a signal; empty for other names and texts."""
    if name == "SIGKILL":
        return "if nobody killed it, the host may have run out of memory: `dmesg` shows what the kernel has killed"
    if name not in _FAULTS:
        return ""
    hint = "the environment variable PYTHONFAULTHANDLER=1 makes Python show the line where this happens"
    return f"{hint}; is /dev/shm full (`df -h /dev/shm`)?" if name == "SIGBUS" else hint


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_status(status: int) -> int:
    """Return the exit status of a program that passes on that of a child: 128 + signal, as shells do."""
    return INTERRUPT_BASE - status if status < 0 else status


class AtExit:
    """Calls a function once, when the process ends, with the error that it ends with, None without one or if unknown.

    A child of multiprocessing may end without the interpreter's atexit; it has finalizers of its own.
    """

    def __init__(self, function: Callable[[BaseException | None], None]) -> None:
        self._function = function
        self._cancel: Callable[[], object] | None = None
        atexit.register(self._call)
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            from multiprocessing.util import Finalize

            self._cancel = Finalize(None, self._call, exitpriority=0).cancel

    def cancel(self) -> None:
        atexit.unregister(self._call)
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def _call(self) -> None:
        self.cancel()
        # The interpreter and the launchers set the first; a child of multiprocessing has the second.
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        self._function(None if isinstance(error, SystemExit) and not error.code else error)
