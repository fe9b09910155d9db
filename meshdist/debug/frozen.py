"""Where a rank is that does not come back to Python: inside a library, in a system call, or holding Python's lock.

Such a rank cannot answer by itself. But its signal handler runs, and `faulthandler` writes from there, without Python,
which lines of code its main thread is in: into memory without a name, where a process of the same user finds them.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

from meshdist.call import is_ours

_NAME = "meshdist-stack"
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_MOST_BYTES = 1 << 16


class StackFile:
    """Takes the stack of this process's main thread, at each signal.

    The handler that Python has for the signal is called as well, as soon as it can be.

    Args:
        number: The signal.

    Raises:
        OSError: There is no such memory here.

    Example:
        >>> import os, signal
        >>> before = signal.signal(signal.SIGURG, lambda *_: None)
        >>> file = StackFile(signal.SIGURG)
        >>> os.kill(os.getpid(), signal.SIGURG)
        >>> len(stack_of_process(os.getpid())) > 0
        True
        >>> file.close()
        >>> _ = signal.signal(signal.SIGURG, before)
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._fd = _new_file()
        if sys.platform != "win32":
            # This thread alone: to look at others, which go on meanwhile, would not be safe.
            faulthandler.register(number, self._fd, all_threads=False, chain=True)

    def empty(self) -> None:
        """Forget what was taken."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)

    def close(self) -> None:
        """Take no more."""
        if sys.platform != "win32":
            faulthandler.unregister(self._number)
        os.close(self._fd)


def _new_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    raise OSError(errno.ENOSYS, "this system has no memory that others find by a name")


def stack_of_process(pid: int) -> list[str]:
    """Return what another process's `StackFile` took last, the outermost line first; empty where there is nothing."""
    with suppress(OSError):  # it has ended, or is another user's
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link).startswith(f"/memfd:{_NAME}"):
                with open(link, "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
                    return _lines(file.read().decode(errors="replace"))
    return []


def _lines(text: str) -> list[str]:
    # The last of those that were taken; it has the innermost line first.
    last = text[text.rfind("most recent call first") :]
    found = [f"{match['file']}:{match['line']} in {match['function']}" for match in _LINE.finditer(last)]
    return found[::-1]


def place_of_process(pid: int) -> str | None:
    """Return the innermost line of another process's own code, as far as is known."""
    lines = stack_of_process(pid)
    own = [line for line in lines if not is_ours(line.partition(":")[0]) and "/lib/python3" not in line]
    return next(iter((own or lines)[-1:]), None)
