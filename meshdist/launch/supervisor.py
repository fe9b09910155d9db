"""Supervisor: watches the ranks of a launcher, notices failures, finds which came first, and ends the other ranks."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from meshdist.launch.failures import Failure, first_cause, read_error_file
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.reaper import Reaper
from meshdist.launch.worker_env import Job
from meshdist.launch.worker_set import Exit, Member, WorkerSet
from meshdist.system.deadline import Deadline

DEFAULT_GRACE_S = 10.0
"""How long a rank may take to end after a request."""

DEFAULT_INTERVAL_S = 0.25
"""Period of checks without a descriptor, such as for the ranks' error files."""

# How long the cause of known failures may take, on a busy machine, to be noticed or written: where these are secondary,
# so that there must be one, and where a call of meshdist failed, which one of the other ranks may have caused.
_SETTLE_S = 3.0
_SETTLE_SHARED_S = 0.7
_SETTLE_SLICE_S = 0.02
_AFTER_KILL_S = 5.0


class Supervisor:
    """Watches the ranks of a job.

    A rank has failed when it exited with a nonzero status, or as soon as it wrote its error file (one of its threads
    may keep it from exiting). A failing rank makes its peers fail within milliseconds, and their failures may be
    noticed first. So if all known failures are secondary, wait for their cause before reporting, as long as other ranks
    run and for at most three seconds. A call that ranks waited for in a circle, or that they made with other arguments,
    fails on all of them, and one may have made it in the handler of the exception that is the cause: wait less than a
    second for that.
    """

    def __init__(self, job: Job, interrupts: Interrupts | None = None, interval_s: float = DEFAULT_INTERVAL_S) -> None:
        self.job = job
        # Called for each process that has ended, and whether it was this supervisor that ended it.
        self.on_exit: Callable[[Exit, bool], object] = lambda exit, was_ended: None
        self._interval_s = interval_s
        self._interrupts = interrupts
        self.reaper = Reaper(job.error_directory)
        self._worker_set = WorkerSet(self.reaper, interrupts.fileno() if interrupts else None)
        self._failures: dict[int, Failure] = {}
        self._ending_since_s: float | None = None
        self._host = socket.gethostname()
        self.ended: list[int] = []  # the ranks that did not fail but were ended, in the order of their end
        self.killed: list[int] = []  # those of them that had to be killed
        self.exits: dict[int, Exit] = {}  # how the processes ended, by rank, successful ones too

    def add(self, member: Member) -> None:
        self._worker_set.add(member)

    @property
    def running(self) -> list[int]:
        return sorted(self._worker_set.running)

    @property
    def failures(self) -> list[Failure]:
        """The known failures, the cause first, the others by time."""
        known = sorted(self._failures.values(), key=lambda failure: failure.monotonic_s)
        if known:
            cause = first_cause(known)
            known.remove(cause)
            known.insert(0, cause)
        return known

    def watch(self, deadline: Deadline, is_over: Callable[[], object] = lambda: None) -> bool:
        """Wait until all ranks have ended, one has failed, or a signal came; return False at the deadline.

        `is_over` is called at intervals, and returns a true value if there is another reason to stop waiting.
        """
        while self._worker_set.running:
            self._wait(deadline.slice_s(self._interval_s))
            if is_over() or (self._interrupts is not None and self._interrupts.pending()):
                return True
            if self._failures:
                self._settle()
                return True
            if self._worker_set.running and deadline.expired():
                return False
        return True

    def end(self, number: signal.Signals, grace_s: float) -> None:
        """Ask the remaining ranks to end; kill the rest after `grace_s`, or at the next signal to this launcher."""
        self._ending_since_s = time.monotonic()
        self._worker_set.signal(number)
        if sys.platform != "win32":
            self._worker_set.signal(signal.SIGCONT)  # a stopped rank would not handle it
        deadline = Deadline(grace_s)
        while self._worker_set.running and not deadline.expired():
            self._wait(deadline.slice_s(self._interval_s))
            if self._interrupts is not None and self._interrupts.take():
                break
        self.killed = list(self._worker_set.running)
        self._worker_set.kill()
        deadline = Deadline(_AFTER_KILL_S)
        while self._worker_set.running and not deadline.expired():
            self._wait(deadline.slice_s(self._interval_s))

    def close(self) -> None:
        """End all processes and remove the error directory."""
        import shutil

        self._worker_set.close()
        if os.path.isdir(self.job.error_directory):
            shutil.rmtree(self.job.error_directory, ignore_errors=True)

    def _settle(self) -> None:
        limits = {True: Deadline(_SETTLE_S), False: Deadline(_SETTLE_SHARED_S)}
        while self._worker_set.running:
            first = first_cause(self._failures.values())
            deadline = limits[first.secondary]
            if first.is_explained or deadline.expired():
                break
            self._wait(deadline.slice_s(_SETTLE_SLICE_S))

    def _wait(self, timeout_s: float) -> None:
        exits = self._worker_set.wait(timeout_s)
        if os.path.isdir(self.job.error_directory):
            for rank in self._worker_set.running:
                self._note_error_file(rank)
        for exit in exits:
            self._note_exit(exit)

    def _note_error_file(self, rank: int) -> None:
        """Record the failure that `rank` described, unless it failed only because it is being ended."""
        if rank in self._failures:
            return
        failure = read_error_file(self.job.error_file(rank), rank)
        if failure is not None and (self._ending_since_s is None or failure.monotonic_s < self._ending_since_s):
            self._failures[rank] = failure

    def _note_exit(self, exit: Exit) -> None:
        self.exits[exit.rank] = exit
        self._note_error_file(exit.rank)
        failure = self._failures.get(exit.rank)
        is_ending = self._ending_since_s is not None
        # A rank that has failed may be terminated before its process exits.
        shown = exit._replace(status=failure.status) if is_ending and failure is not None else exit
        self.on_exit(shown, is_ending and failure is None)
        if is_ending:
            if failure is None:
                self.ended.append(exit.rank)
        elif exit.status == 0:
            self._failures.pop(exit.rank, None)
        elif failure is not None:
            self._failures[exit.rank] = failure._replace(status=exit.status)
        else:
            self._failures[exit.rank] = Failure(
                exit.rank, exit.pid, self._host, exit.status, exit.time_s, exit.monotonic_s
            )
