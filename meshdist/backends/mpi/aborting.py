"""A rank that ends with an exception, or a status, ends the MPI job: the others would wait for it for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from meshdist.backends.mpi.exiting import WatchedExit
from meshdist.backends.mpi.library import Session

_READ_S = 0.5
# MPICH's launcher does not mind how a process ends that has not started MPI, and all others wait for that in MPI's own
# start. What it listens to is the PMI-1 protocol (P. Balaji et al.: "PMI: A Scalable Parallel Process-Management
# Interface for Extreme-Scale Systems", EuroMPI 2010), at the descriptor of this name; that of Slurm is another one.
_PMI_DESCRIPTOR, _SIGN_OF_MPICH = "PMI_FD", "HYDI_CONTROL_FD"


class Aborting:
    """Shows an exception as before, and then aborts the job."""

    def __init__(self, shown: Callable[..., Any]) -> None:
        self.shown = shown

    def __call__(self, *error: Any) -> None:
        """Show an exception that nobody caught, and abort the job."""
        self.shown(*error)
        abort_job(1)


class AbortingThreads(Aborting):
    """The same for threads, which may end with SystemExit as they like."""

    def __call__(self, *error: Any) -> None:
        """Show what ended a thread, and abort the job."""
        self.shown(*error)
        if error[0].exc_type is not SystemExit:
            abort_job(1)


def abort_job(status: int) -> None:
    """End all ranks of the job, and have its launcher exit with `status`; also where MPI has not been started here."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Launchers throw away what they have not read when they are told to abort, as MPICH's does.
    time.sleep(_READ_S)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        if not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(status)
    elif _SIGN_OF_MPICH in os.environ:
        with suppress(KeyError, ValueError, OSError):  # then there is nobody who could be told
            os.write(int(os.environ[_PMI_DESCRIPTOR]), f"cmd=abort exitcode={status}\n".encode())


def abort_on_early_exceptions() -> None:
    """Have an exception that nobody catches abort the job, already before `init_process_group`."""
    if not isinstance(sys.excepthook, Aborting):
        sys.excepthook = Aborting(sys.excepthook)


def abort_on_exceptions(session: Session) -> Callable[[], None]:
    """Have an exception that nobody catches, in any thread, and `sys.exit(3)` abort the job; return what ends that."""
    abort_on_early_exceptions()
    if not isinstance(threading.excepthook, Aborting):
        threading.excepthook = AbortingThreads(threading.excepthook)
    if not isinstance(sys.exit, WatchedExit):
        sys.exit = WatchedExit(sys.exit, partial(_exit, session))
    return _restore


def _exit(session: Session, status: int) -> None:
    print(
        f"meshdist: rank {session.rank} of {session.size} in MPI exits with status {status}, without"
        " destroy_process_group(): the MPI job is aborted with that status",
        file=sys.stderr,
    )
    abort_job(status)


def _restore() -> None:
    if isinstance(sys.excepthook, Aborting):
        sys.excepthook = sys.excepthook.shown
    if isinstance(threading.excepthook, Aborting):
        threading.excepthook = threading.excepthook.shown
    if isinstance(sys.exit, WatchedExit):
        sys.exit = sys.exit.exit_
