"""Command lines whose reader goes before all is written, as `head` does."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress

BROKEN_PIPE = 141
"""The exit status, that of a program that SIGPIPE ended."""


def until_closed(main: Callable[[], int]) -> int:
    """Run a command line and return its exit status; end it quietly once its output is closed.

    Raises:
        SystemExit: `main` raised it.
    """
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # what is left would fail at exit
    except BrokenPipeError:
        if not _is_closed():  # that of a connection
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's output at exit
        return BROKEN_PIPE


def _is_closed() -> bool:
    """Return whether nothing reads stdout any more."""
    with suppress(OSError, ValueError):
        if sys.platform == "win32":
            return True
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
