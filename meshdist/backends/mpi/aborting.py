"""End the MPI job when a rank ends by an uncaught exception or by `sys.exit` with a status other than 0.

Otherwise the other ranks would wait for it forever: MPI_Finalize waits for all processes, so the launcher would learn
the status of the first rank only after the others have failed with a different error, because this rank had gone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from meshdist.backends.mpi.library import Session
from meshdist.backends.mpi.shared_report import SharedReport


class WatchedExit:
    """A `sys.exit` that detects that its SystemExit was not caught, and then aborts the job as the process ends.

    The SystemExit carries a token whose `__del__` runs when the exception is freed. Code that catches the exception is
    a Python frame at that moment; the interpreter, which handles an uncaught one at exit, has no Python frame left. If
    an implementation frees it later or never, nothing happens: the job ends as without this class.

    Args:
        exit_: The previous `sys.exit`.
        end: Called at exit with the status, if that is not 0.
    """

    def __init__(self, exit_: Callable[..., NoReturn], end: Callable[[int], None]) -> None:
        self.exit_ = exit_
        self._end = end

    def __call__(self, status: object = None, /) -> NoReturn:
        # Bind the exception to no variable that outlives this frame: its traceback refers to the frame.
        try:
            self.exit_(status)
        except SystemExit as error:
            code = exit_status(error.code)
            if code and threading.current_thread() is threading.main_thread():
                error.__dict__["_watched"] = _Watched(code, self._leave)
            raise

    def _leave(self, status: int) -> None:
        # atexit runs the last registered function first: before the groups are closed, which other ranks would see as
        # an error.
        if getattr(sys, "exit", None) is self:
            atexit.register(self._end, status)


class _Watched:
    """Token that lives as long as the SystemExit that holds it."""

    def __init__(self, status: int, leave: Callable[[int], None]) -> None:
        self._status = status
        self._leave = leave

    def __del__(self) -> None:
        # Without a calling frame, the interpreter itself frees the exception: nothing caught it.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and sys._getframe().f_back is None:
            self._leave(self._status)


def exit_status(code: object) -> int:
    """Return the exit status of a process that raises SystemExit(code)."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


_READ_S = 0.5
# MPICH's launcher ignores how a process ends that has not started MPI, while all others wait for it in MPI_Init. The
# launcher reads the PMI-1 protocol (P. Balaji et al.: "PMI: A Scalable Parallel Process-Management Interface for
# Extreme-Scale Systems", EuroMPI 2010) from the descriptor of this name; Slurm uses a different protocol.
_PMI_DESCRIPTOR, _SIGN_OF_MPICH = "PMI_FD", "HYDI_CONTROL_FD"


class Aborting:
    """An exception hook that calls the previous hook and then aborts the job.

    Attributes:
        shown: The previous hook.
        report: Has one rank call it for an error that several have; None before this rank has joined a world.
        frames: Returns the part of the traceback to show; None before this rank has joined a world.
    """

    def __init__(self, shown: Callable[..., Any]) -> None:
        self.shown = shown
        self.report: SharedReport | None = None
        self.frames: Callable[[BaseException], TracebackType | None] | None = None

    def __call__(self, *error: Any) -> None:
        kind, exception, frames = error
        if self.frames is not None:
            frames = self.frames(exception)
        self.end(exception, kind, exception.with_traceback(frames), frames)

    def end(self, exception: BaseException, *error: Any) -> None:
        """Show an uncaught exception by the previous hook, which takes it as `error`, and abort the job."""
        if self.report is None:
            self.shown(*error)
        else:
            self.report.tell(partial(self.shown, *error), exception)
        abort_job(1)


class AbortingThreads(Aborting):
    """The same for `threading.excepthook`; a thread may end by SystemExit."""

    def __call__(self, *error: Any) -> None:
        if error[0].exc_type is SystemExit:
            self.shown(*error)
        else:
            self.end(error[0].exc_value, *error)


def abort_job(status: int) -> None:
    """Abort all ranks of the job and have its launcher exit with `status`, even if MPI is not initialized here."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Launchers such as MPICH's discard output that they have not read when they are told to abort.
    time.sleep(_READ_S)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        if not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(status)
    elif _SIGN_OF_MPICH in os.environ:
        with suppress(KeyError, ValueError, OSError):  # then there is no launcher to notify
            os.write(int(os.environ[_PMI_DESCRIPTOR]), f"cmd=abort exitcode={status}\n".encode())


def abort_on_early_exceptions() -> None:
    """Install the exception hook that aborts the job, also before `init_process_group`."""
    if not isinstance(sys.excepthook, Aborting):
        sys.excepthook = Aborting(sys.excepthook)


def report_once(report: SharedReport, frames: Callable[[BaseException], TracebackType | None]) -> Callable[[], None]:
    """Have uncaught exceptions shown with `frames`, by one of the ranks that have them; return what undoes that."""
    hooks = [hook for hook in (sys.excepthook, threading.excepthook) if isinstance(hook, Aborting)]
    for hook in hooks:
        hook.report, hook.frames = report, frames

    def undo() -> None:
        for hook in hooks:
            hook.report = hook.frames = None

    return undo


def abort_on_exceptions(session: Session) -> Callable[[], None]:
    """Have an uncaught exception in any thread, and `sys.exit(3)`, abort the job; return a function to undo it."""
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
