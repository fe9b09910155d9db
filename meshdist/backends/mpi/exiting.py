"""A rank that exits with a status other than 0 ends the MPI job with that status.

MPI waits at the end of each process for those of all others, so its launcher would not learn the status before they
have ended: by then of another error, as this rank had gone.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


class WatchedExit:
    """A `sys.exit` that tells where nobody caught what it raised, so that the process ends by it.

    Args:
        exit_: The `sys.exit` that was there before.
        end: Called in the end of the process, with its status, where that is not 0.
    """

    def __init__(self, exit_: Callable[..., NoReturn], end: Callable[[int], None]) -> None:
        self.exit_ = exit_
        self._end = end

    def __call__(self, status: object = None, /) -> NoReturn:
        """Raise SystemExit, as `sys.exit` does."""
        # No variable may hold the error: its traceback holds those.
        try:
            self.exit_(status)
        except SystemExit as error:
            code = exit_status(error.code)
            if code and threading.current_thread() is threading.main_thread():
                error.__dict__["_watched"] = _Watched(code, self._leave)
            raise

    def _leave(self, status: int) -> None:
        # What is registered last is called first: before the groups are closed, which others would take for an error.
        if getattr(sys, "exit", None) is self:
            atexit.register(self._end, status)


class _Watched:
    """Goes with the error, and is deleted with it."""

    def __init__(self, status: int, leave: Callable[[int], None]) -> None:
        self._status = status
        self._leave = leave

    def __del__(self) -> None:
        # An error that was caught goes while the code that caught it runs. The interpreter itself has none left then.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and sys._getframe().f_back is None:
            self._leave(self._status)


def exit_status(code: object) -> int:
    """Return the status with which a process ends that raises SystemExit(code).

    Example:
        >>> [exit_status(code) for code in (None, 0, 3, 259, True, "it failed")]
        [0, 0, 3, 3, 1, 1]
    """
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
