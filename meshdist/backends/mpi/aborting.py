"""A rank that ends with an exception ends the MPI job: the others would wait for it for ever."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from meshdist.backends.mpi.library import Session

_READ_S = 0.5


class Aborting:
    """Shows an exception as before, and then aborts the job."""

    def __init__(self, session: Session, shown: Callable[..., Any]) -> None:
        self.shown = shown
        self._session = session

    def __call__(self, *error: Any) -> None:
        """Show an exception that nobody caught, and abort the job."""
        self.shown(*error)
        self._abort()

    def _abort(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # Launchers throw away what they have not read when they are told to abort, as MPICH's does.
        time.sleep(_READ_S)
        if not self._session.mpi.Is_finalized():
            self._session.mpi.COMM_WORLD.Abort(1)


class AbortingThreads(Aborting):
    """The same for threads, which may end with SystemExit as they like."""

    def __call__(self, *error: Any) -> None:
        """Show what ended a thread, and abort the job."""
        self.shown(*error)
        if error[0].exc_type is not SystemExit:
            self._abort()


def abort_on_exceptions(session: Session) -> Callable[[], None]:
    """Have an exception that nobody catches, in any thread, abort the job; return what ends that."""
    if not isinstance(sys.excepthook, Aborting):
        sys.excepthook = Aborting(session, sys.excepthook)
    if not isinstance(threading.excepthook, Aborting):
        threading.excepthook = AbortingThreads(session, threading.excepthook)
    return _restore


def _restore() -> None:
    if isinstance(sys.excepthook, Aborting):
        sys.excepthook = sys.excepthook.shown
    if isinstance(threading.excepthook, Aborting):
        threading.excepthook = threading.excepthook.shown
