"""A rank that ends with an exception, or a status, ends the MPI job: the others would wait for it for ever."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from meshdist.backends.mpi.exiting import WatchedExit
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
        abort_job(self._session, 1)


class AbortingThreads(Aborting):
    """The same for threads, which may end with SystemExit as they like."""

    def __call__(self, *error: Any) -> None:
        """Show what ended a thread, and abort the job."""
        self.shown(*error)
        if error[0].exc_type is not SystemExit:
            abort_job(self._session, 1)


def abort_job(session: Session, status: int) -> None:
    """End all ranks of the job, and have its launcher exit with `status`."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Launchers throw away what they have not read when they are told to abort, as MPICH's does.
    time.sleep(_READ_S)
    if not session.mpi.Is_finalized():
        session.mpi.COMM_WORLD.Abort(status)


def abort_on_exceptions(session: Session) -> Callable[[], None]:
    """Have an exception that nobody catches, in any thread, and `sys.exit(3)` abort the job; return what ends that."""
    if not isinstance(sys.excepthook, Aborting):
        sys.excepthook = Aborting(session, sys.excepthook)
    if not isinstance(threading.excepthook, Aborting):
        threading.excepthook = AbortingThreads(session, threading.excepthook)
    if not isinstance(sys.exit, WatchedExit):
        sys.exit = WatchedExit(sys.exit, partial(_exit, session))
    return _restore


def _exit(session: Session, status: int) -> None:
    print(
        f"meshdist: rank {session.rank} of {session.size} in MPI exits with status {status}, without"
        " destroy_process_group(): the MPI job is aborted with that status",
        file=sys.stderr,
    )
    abort_job(session, status)


def _restore() -> None:
    if isinstance(sys.excepthook, Aborting):
        sys.excepthook = sys.excepthook.shown
    if isinstance(threading.excepthook, Aborting):
        threading.excepthook = threading.excepthook.shown
    if isinstance(sys.exit, WatchedExit):
        sys.exit = sys.exit.exit_
