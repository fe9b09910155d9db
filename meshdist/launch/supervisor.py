"""What a launcher does about the end of its ranks: notice the first failure, find its cause, end the others."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from meshdist.deadline import Deadline
from meshdist.launch.crew import Crew, Exit, Member
from meshdist.launch.env import Job
from meshdist.launch.failures import Failure, first_cause, read_error_file
from meshdist.launch.guard import Guard
from meshdist.launch.interrupts import Interrupts

DEFAULT_GRACE_S = 10.0
"""How long a rank may take to end after it was asked to."""

DEFAULT_INTERVAL_S = 0.25
"""How often to look at what no descriptor tells, such as the ranks' error files."""

_SETTLE_S = 0.2
_SETTLE_SLICE_S = 0.02
_AFTER_KILL_S = 5.0


class Supervisor:
    """Watches over the ranks of a job.

    A rank has failed when it ended badly, or as soon as it wrote its error file (a thread of its own may keep it from
    ending). A failing rank makes its peers fail within milliseconds, and these may well be noticed first. So before the
    cause is named, ranks that may be dying get a short moment, unless one of the failures known is a cause by itself.

    Attributes:
        job: What the ranks have in common.
        ended: The ranks that did not fail but were ended, in the order of their end.
        killed: Those of them that had to be killed.
        exits: How the processes ended, by rank, the well ones too.

    Example:
        >>> from meshdist.launch.env import new_job
        >>> job = new_job(world_size=1, secret="s", master_addr="127.0.0.1", master_port=0)
        >>> supervisor = Supervisor(job)
        >>> supervisor.watch(Deadline(1.0))  # no rank is running
        True
        >>> supervisor.close()
    """

    def __init__(self, job: Job, interrupts: Interrupts | None = None, interval_s: float = DEFAULT_INTERVAL_S) -> None:
        self.job = job
        self._interval_s = interval_s
        self._interrupts = interrupts
        self.guard = Guard(job.error_directory)
        self._crew = Crew(self.guard, interrupts.fileno() if interrupts else None)
        self._failures: dict[int, Failure] = {}
        self._ending_since_s: float | None = None
        self._host = socket.gethostname()
        self.ended: list[int] = []
        self.killed: list[int] = []
        self.exits: dict[int, Exit] = {}

    def add(self, member: Member) -> None:
        """Take in a rank that was just started."""
        self._crew.add(member)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return sorted(self._crew.running)

    @property
    def failures(self) -> list[Failure]:
        """The failures known, the cause of all first, the others by time."""
        known = sorted(self._failures.values(), key=lambda failure: failure.time_s)
        if known:
            cause = first_cause(known)
            known.remove(cause)
            known.insert(0, cause)
        return known

    def watch(self, deadline: Deadline, is_over: Callable[[], object] = lambda: None) -> bool:
        """Wait until all ranks have ended, one has failed, or a signal came; return False at the deadline.

        Args:
            deadline: When to give up.
            is_over: Tells whether there is another reason to wait no longer; asked now and then.
        """
        while self._crew.running:
            self._wait(deadline.slice_s(self._interval_s))
            if is_over() or (self._interrupts is not None and self._interrupts.pending()):
                return True
            if self._failures:
                self._settle()
                return True
            if self._crew.running and deadline.expired():
                return False
        return True

    def end(self, number: signal.Signals, grace_s: float) -> None:
        """Ask the ranks that are left to end; kill those that have not after `grace_s`, or at the next signal to us."""
        self._ending_since_s = time.time()
        self._crew.signal(number)
        if sys.platform != "win32":
            self._crew.signal(signal.SIGCONT)  # a stopped rank would not hear of it
        deadline = Deadline(grace_s)
        while self._crew.running and not deadline.expired():
            self._wait(deadline.slice_s(self._interval_s))
            if self._interrupts is not None and self._interrupts.take():
                break
        self.killed = list(self._crew.running)
        self._crew.kill()
        deadline = Deadline(_AFTER_KILL_S)
        while self._crew.running and not deadline.expired():
            self._wait(deadline.slice_s(self._interval_s))

    def close(self) -> None:
        """Leave nothing behind: no process, no file."""
        import shutil

        self._crew.close()
        if os.path.isdir(self.job.error_directory):
            shutil.rmtree(self.job.error_directory, ignore_errors=True)

    def _settle(self) -> None:
        deadline = Deadline(_SETTLE_S)
        while self._crew.running and first_cause(self._failures.values()).secondary and not deadline.expired():
            self._wait(deadline.slice_s(_SETTLE_SLICE_S))

    def _wait(self, timeout_s: float) -> None:
        exits = self._crew.wait(timeout_s)
        if os.path.isdir(self.job.error_directory):
            for rank in self._crew.running:
                self._note_error_file(rank)
        for exit in exits:
            self._note_exit(exit)

    def _note_error_file(self, rank: int) -> None:
        """Take in what `rank` wrote about its failure, unless it only fails because it is being ended."""
        if rank in self._failures:
            return
        failure = read_error_file(self.job.error_file(rank), rank)
        if failure is not None and (self._ending_since_s is None or failure.time_s < self._ending_since_s):
            self._failures[rank] = failure

    def _note_exit(self, exit: Exit) -> None:
        self.exits[exit.rank] = exit
        self._note_error_file(exit.rank)
        failure = self._failures.get(exit.rank)
        if self._ending_since_s is not None:
            if failure is None:
                self.ended.append(exit.rank)
        elif exit.status == 0:
            self._failures.pop(exit.rank, None)
        elif failure is not None:
            self._failures[exit.rank] = failure._replace(status=exit.status)
        else:
            self._failures[exit.rank] = Failure(exit.rank, exit.pid, self._host, exit.status, exit.time_s)
