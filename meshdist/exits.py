"""Exits: a function that is called as the process ends, and with what error it ends, as far as that can be known."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable


class AtExit:
    """Calls a function once, when the process ends.

    A child of multiprocessing may end past the interpreter's own way, and says there what it ends with.

    Args:
        function: Given the error that the process ends with, None where it is none or nobody knows.

    Example:
        >>> at_exit = AtExit(print)
        >>> at_exit.cancel()
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
        """Call nothing."""
        atexit.unregister(self._call)
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def _call(self) -> None:
        self.cancel()
        # The first is set by the interpreter, and by the launchers; the second is that of multiprocessing's child.
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        self._function(None if isinstance(error, SystemExit) and not error.code else error)
