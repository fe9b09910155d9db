"""Where operating systems differ, and what is said where one cannot do what is asked for."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

from meshdist.errors import DistError

# So that programs which are started do not get a descriptor; on Windows they never do.
CLOSE_ON_EXEC: int = getattr(os, "O_CLOEXEC", 0)

_NO_PROCESSES = (
    "ranks that are processes need Linux or macOS; on Windows, run them as threads, meshdist.run(fn, world_size), or"
    " use the Windows Subsystem for Linux"
)


if sys.platform == "win32":
    KILL = signal.SIGTERM  # which ends a process at once there

    def let_others_run() -> None:
        """Let another thread have the processor, if one waits for it."""
        time.sleep(0)
else:
    KILL = signal.SIGKILL
    let_others_run = os.sched_yield


def user_id() -> int:
    """Return the number of the user; on Windows 0, which every file has as its owner."""
    if sys.platform == "win32":
        return 0
    return os.geteuid()


def why_no_processes() -> str | None:
    """Return why ranks cannot be processes on this system; None where they can.

    Example:
        >>> import sys
        >>> (why_no_processes() is None) == (sys.platform != "win32")
        True
    """
    return _NO_PROCESSES if sys.platform == "win32" else None


def check_processes(where: str) -> None:
    """Raise if ranks cannot be processes on this system.

    Args:
        where: What was called, for the message.

    Raises:
        DistError: They cannot.
    """
    why = why_no_processes()
    if why is not None:
        raise DistError(f"{where}: {why}")


def available_cores() -> int:
    """Return the number of processors that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ioctl(fd: int, request: int, argument: bytes) -> bytes:
    """Return the answer of a device driver.

    Args:
        fd: An open descriptor of the device, or a socket's.
        request: What is asked for, a number of the system's own.
        argument: As long as the answer.

    Raises:
        OSError: It refuses; on Windows, always.
    """
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "there is no ioctl on Windows")
    import fcntl

    return fcntl.ioctl(fd, request, argument)
