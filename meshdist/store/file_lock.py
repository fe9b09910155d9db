"""The lock on an open file that processes of one or several hosts exclude each other by."""

from __future__ import annotations

import os
import struct
import sys


def missing_locks() -> str | None:
    """Return what this system lacks for such locks, None where it has them."""
    try:
        import fcntl  # noqa: F401 - only a store in a file needs it, and not every system has it
    except ImportError:
        return f"this system ({sys.platform}) has no fcntl file locks"
    return None


def try_lock(fd: int) -> bool:
    """Lock the open file for writing; return False if somebody else has the lock."""
    import fcntl

    try:
        if sys.platform == "linux":
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
        elif sys.platform != "win32":
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int) -> None:
    """Let others have the lock."""
    import fcntl

    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))
    elif sys.platform != "win32":
        fcntl.flock(fd, fcntl.LOCK_UN)


def _flock(kind: int) -> bytes:
    # struct flock: type, whence, start, length (0 is "to the end"), pid; padded as in C
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)
