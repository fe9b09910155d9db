"""The stack of a rank that is blocked in native code: in a library, in a system call, or holding the GIL.

Such a rank cannot answer a request. But its signal handler runs, and `faulthandler` writes the Python stack of the main
thread from there, without the interpreter, into anonymous memory that processes of the same user can open.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import signal
import sys
from contextlib import suppress

from meshdist.runtime.call_site import is_ours

_NAME = "meshdist-stack"
_LINE = r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)'  # a pattern, compiled at its first use
_MOST_BYTES = 1 << 16


class StackFile:
    """Records the stack of this process's main thread at each signal `number`.

    The Python handler of the signal is called too, as soon as the interpreter can.

    Raises:
        OSError: The system has no such memory.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._fd = _new_file()
        if sys.platform != "win32":
            # This thread alone: reading the stacks of running threads would not be safe.
            faulthandler.register(number, self._fd, all_threads=False, chain=True)

    def empty(self) -> None:
        """Discard the recorded stacks."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)

    def close(self) -> None:
        if sys.platform != "win32":
            faulthandler.unregister(self._number)
        os.close(self._fd)


def _new_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    raise OSError(errno.ENOSYS, "this system has no memory that others find by a name")


def stack_of_process(pid: int) -> list[str]:
    """Return the last stack that another process's `StackFile` recorded, outermost line first; empty without one."""
    with suppress(OSError):  # it has ended, or belongs to another user
        folder = f"/proc/{pid}/fd"
        for link in (os.path.join(folder, name) for name in os.listdir(folder)):
            if os.readlink(link).startswith(f"/memfd:{_NAME}"):
                with open(link, "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
                    return _lines(file.read().decode(errors="replace"))
    return []


def _lines(text: str) -> list[str]:
    # The last recorded stack; it has the innermost line first.
    last = text[text.rfind("most recent call first") :]
    found = [f"{match['file']}:{match['line']} in {match['function']}" for match in re.finditer(_LINE, last)]
    return found[::-1]


def place_of_process(pid: int) -> str | None:
    """Return the innermost line of another process's own code, if known."""
    lines = stack_of_process(pid)
    own = [line for line in lines if not is_ours(line.partition(":")[0]) and "/lib/python3" not in line]
    return next(iter((own or lines)[-1:]), None)
