"""Limits of the system: what is said where a call comes to one, so that it names the limit and how to raise it."""

from __future__ import annotations

import errno
import threading

from meshdist.errors import DistBackendError, DistError

_NO_FILES = (errno.EMFILE, errno.ENFILE)


def limit_of(error: BaseException) -> str:
    """Return which limit an error comes of, as the end of its message; empty where it comes of none.

    Example:
        >>> limit_of(OSError(errno.EMFILE, "Too many open files")).partition(":")[0]
        '; no file descriptor is left'
        >>> limit_of(OSError(errno.ENOENT, "No such file or directory"))
        ''
    """
    if not isinstance(error, OSError) or error.errno not in _NO_FILES:
        return ""
    try:
        import resource
    except ImportError:  # where there is no such module, there is no such limit
        return ""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"; no file descriptor is left: raise `ulimit -n`, which is {allowed}"


def at_limit(error: BaseException) -> BaseException:
    """Return an error that names the limit where `error` comes of one, else `error` itself."""
    limit = limit_of(error)
    return DistBackendError(f"{error}{limit}") if limit else error


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        DistError: The system allows no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise DistError(
            f"{error}: no thread is left for {thread.name!r}; raise `ulimit -u`, or the container's limit of processes"
        ) from error
