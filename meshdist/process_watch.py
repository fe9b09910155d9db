"""Whether another process lives, and how it ended."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from pathlib import Path

from meshdist.exit_status import describe_status
from meshdist.limits import limit_of

# PIDFD_GET_INFO and what it is asked for, of <linux/pidfd.h>: how a process ended, also after its parent has asked.
_GET_INFO, _INFO_BYTES, _INFO_EXIT = 0xC040FF0B, 64, 1 << 3
# Where the answer has it.
_EXIT_CODE = slice(60, 64)
# Fields 22 and 52 of /proc/<pid>/stat, counted from its state on.
_STARTED, _CODE = 19, 49


def started_at(pid: int) -> int:
    """Return when process `pid` started, in clock ticks since boot; 0 for no such process, or no way to know."""
    fields = fields_of(pid)
    # A zombie has ended: only its exit status is still to be asked for.
    return 0 if not fields or fields[0] in "ZX" else int(fields[_STARTED])


def fields_of(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; nothing where there is none, or no way to know."""
    try:
        # The second field, the name, is in parentheses and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        if limit_of(error):
            raise  # to be taken for an end would be wrong
        return []


class ProcessWatch:
    """Tells whether one process lives, by pidfd where there are such, and how it ended."""

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
                self._fd = None  # forbidden here, by a sandbox say: the process is looked up in other ways
        # The pid may have been given to another process before the pidfd was opened.
        if started and started_at(self._pid) != started:
            self._ended = True

    def ended(self) -> bool:
        """Return True once the process has ended."""
        if self._ended:
            return True
        if sys.platform != "win32" and self._fd is not None:
            poll = select.poll()  # a new one: another thread may look at the same time
            poll.register(self._fd, select.POLLIN)
            self._ended = bool(poll.poll(0))
        else:
            self._ended = started_at(self._pid) != self._started if self._started else self._unsignalled()
        return self._ended

    def how_ended(self) -> str | None:
        """Return how the process ended, as in "was killed by SIGKILL"; None where nobody can know.

        The kernel tells as long as the parent has not asked, and since Linux 6.15 also after that.
        """
        code = self._code_of_zombie() or self._code_by_pidfd()
        return None if code is None else describe_status(os.waitstatus_to_exitcode(code))

    def close(self) -> None:
        """Give back the pidfd."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _code_of_zombie(self) -> int | None:
        fields = fields_of(self._pid)
        is_its = len(fields) > _CODE and fields[0] == "Z" and int(fields[_STARTED]) == self._started
        return int(fields[_CODE]) or None if is_its else None  # 0 is also said to those who may not know

    def _code_by_pidfd(self) -> int | None:
        if sys.platform != "linux" or self._fd is None:
            return None
        import fcntl  # there is none on Windows

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
