"""The hosts of a job, as the launcher on one of them sees them: what to start, why to stop, how the job ended."""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshdist.launch.failures import Failure, first_cause
from meshdist.launch.worker_env import Job, job_secret, new_job
from meshdist.store import Store, TCPStore
from meshdist.system.processes import INTERRUPT_BASE, shell_status


class Stop(NamedTuple):
    """Why the ranks of all hosts must end."""

    launcher: int  # the launcher of the host of the problem
    failure: Failure | None = None  # the rank that failed there, if one did
    signal: int = 0  # the number of the signal to its launcher, 0 for none
    problem: str = ""  # the problem of the launcher itself, empty if none
    newcomers: Sequence[str] = []

    def encode(self) -> str:
        return json.dumps({**self._asdict(), "failure": self.failure and self.failure._asdict()})

    @classmethod
    def decode(cls, text: bytes | str) -> Stop:
        fields = json.loads(text)
        return cls(**{**fields, "failure": fields["failure"] and Failure(**fields["failure"])})


class Report(NamedTuple):
    """How one start of the ranks ended on one host."""

    launcher: int
    failures: list[Failure] = []  # noqa: RUF012 - never changed
    signal: int = 0  # the signal that ended the launcher there, 0 for none
    problem: str = ""  # the problem of the launcher there, empty if none
    num_ranks: int = 0  # how many ranks it would start next

    def encode(self) -> str:
        return json.dumps({**self._asdict(), "failures": [failure._asdict() for failure in self.failures]})

    @classmethod
    def decode(cls, text: bytes | str) -> Report:
        fields = json.loads(text)
        return cls(**{**fields, "failures": [Failure(**failure) for failure in fields["failures"]]})


class Verdict(NamedTuple):
    """What all launchers do next."""

    is_restart: bool  # start all ranks again
    status: int  # the exit status of the launchers otherwise
    launcher: int = 0  # that of the host of the cause
    cause: Failure | None = None  # the rank that failed first, if one did
    problem: str = ""  # why the job cannot go on, or not with this host, other than a failed rank
    leaving: list[int] = []  # noqa: RUF012 - never changed; the launchers without which an elastic job goes on
    is_counted: bool = False  # the restart is one of those that --max-restarts allows

    def encode(self) -> str:
        return json.dumps({**self._asdict(), "cause": self.cause and self.cause._asdict()})

    @classmethod
    def decode(cls, text: bytes | str) -> Verdict:
        fields = json.loads(text)
        return cls(**{**fields, "cause": fields["cause"] and Failure(**fields["cause"])})


def judge(reports: Iterable[Report], may_restart: bool, first: int | None = None) -> Verdict:
    """Return what to do next, given one report from each host.

    A signal or a problem of a launcher ends the job; failed ranks do so unless `may_restart`. The clocks of hosts may
    differ: where ranks have failed on several hosts, the cause is on that of launcher `first`, whose stop came first.
    """
    reports = list(reports)
    for report in sorted(reports, key=lambda report: not report.signal):
        if report.signal or report.problem:
            return Verdict(False, _status(report), report.launcher, problem=_problem(report))
    found = _first_failure(reports, first)
    if found is None:
        return Verdict(False, 0)
    launcher, cause = found
    return Verdict(may_restart, shell_status(cause.status), launcher, cause, is_counted=may_restart)


def judge_elastic(
    reports: Iterable[Report],
    may_restart: bool,
    leader: int,
    least_nodes: int,
    has_newcomers: bool,
    first: int | None = None,
) -> Verdict:
    """Return what an elastic job does next, which goes on without a host whose launcher has a problem.

    Only the launcher that leads cannot be missed. Ctrl-C ends the job. If no restart is left, a host leaves on which a
    rank was killed by a signal; other failures end the job, since they would happen again.
    """
    reports = list(reports)
    leaving = [report for report in reports if report.signal or report.problem]
    for report in leaving:
        if report.signal == signal.SIGINT or report.launcher == leader:
            return Verdict(False, _status(report), report.launcher, problem=_problem(report))
    without = [report.launcher for report in leaving]
    found = _first_failure(reports, first)
    if found is not None and not leaving:
        launcher, cause = found
        status = shell_status(cause.status)
        if may_restart:
            return Verdict(True, status, launcher, cause, is_counted=True)
        may_leave = cause.status < 0 and launcher != leader and len(reports) > least_nodes
        return Verdict(may_leave, status, launcher, cause, leaving=[launcher] if may_leave else [])
    if leaving:
        report = leaving[0]
        return Verdict(True, _status(report), report.launcher, problem=_problem(report), leaving=without)
    return Verdict(has_newcomers, 0)


def _status(report: Report) -> int:
    return INTERRUPT_BASE + report.signal if report.signal else 1


def _problem(report: Report) -> str:
    return f"was stopped by {signal.Signals(report.signal).name}" if report.signal else report.problem


def _first_failure(reports: Iterable[Report], first: int | None) -> tuple[int, Failure] | None:
    """Return the failure that caused the others, with the launcher of its host; None without any."""
    causes = [(report.launcher, first_cause(report.failures)) for report in reports if report.failures]

    # A launcher's own clock orders its failures; between hosts the first stop counts.
    def order(one: tuple[int, Failure]) -> tuple[bool, bool, bool, float]:
        launcher, failure = one
        return failure.secondary, not failure.handled, launcher != first, failure.time_s

    return min(causes, key=order, default=None)


class Nodes(ABC):
    """The hosts of a job; this one is number `node` of `num_nodes`. Both may change from start to start."""

    node = 0
    num_nodes = 1
    launcher = 0  # how many launchers came before this one
    first_start = 0  # the start of the ranks with which this launcher began
    num_failed_starts = 0  # how many of the restarts so far --max-restarts counts

    @abstractmethod
    def begin(self, num_restarts: int) -> Job:
        """Return the ranks to start here; their store exists.

        Raises:
            DistError: The store cannot be opened or reached.
        """

    @property
    @abstractmethod
    def ranks_store(self) -> Store:
        """The store of the ranks of this start."""

    @abstractmethod
    def stopped(self) -> Stop | None:
        """Return why the ranks of this start must end, None while they may go on."""

    @abstractmethod
    def stop(self, stop: Stop) -> Stop:
        """End the ranks of all hosts; return the first stop, which may be another host's."""

    @abstractmethod
    def wait_for_others(self) -> None:
        """Wait until the ranks of all hosts have ended, after those here succeeded; or until a signal."""

    @abstractmethod
    def conclude(self, report: Report) -> Verdict:
        """Report how this start ended here, and return what all hosts do next."""

    @abstractmethod
    def close(self) -> None:
        """Close the stores."""

    def node_of(self, launcher: int) -> int | None:
        """Return the number of a launcher's host, None if it has none in this start."""
        return self.node

    def describe(self, launcher: int) -> str:
        """Return the name of a launcher's host for messages."""
        return f"node {self.node_of(launcher)}"


class OneNode(Nodes):
    """This host alone; see `Settings` for the arguments."""

    def __init__(
        self, num_ranks: int, master_addr: str, master_port: int = 0, max_restarts: int = 0, run_id: str | None = None
    ) -> None:
        self._num_ranks = num_ranks
        self._address = master_addr, master_port
        self._max_restarts = max_restarts
        self._run_id = run_id
        self._num_restarts = 0
        self._store: TCPStore | None = None
        self._stop: Stop | None = None

    def begin(self, num_restarts: int) -> Job:
        """Return the ranks to start, with a new store and, unless the user gave one, a new secret each time."""
        self.close()
        self._num_restarts, self._stop = num_restarts, None
        secret = job_secret()
        self._store = TCPStore(*self._address, is_master=True, wait_for_workers=False, secret=secret.encode())
        job = new_job(self._num_ranks, secret, self._address[0], self._store.port, self._run_id)
        self._run_id = job.run_id
        return job._replace(
            num_restarts=num_restarts, num_failed_starts=self.num_failed_starts, max_restarts=self._max_restarts
        )

    @property
    def ranks_store(self) -> Store:
        assert self._store is not None
        return self._store

    def stopped(self) -> Stop | None:
        return self._stop

    def stop(self, stop: Stop) -> Stop:
        self._stop = stop
        return stop

    def wait_for_others(self) -> None:
        self._stop = Stop(self.node)

    def conclude(self, report: Report) -> Verdict:
        self._num_ranks = report.num_ranks or self._num_ranks
        verdict = judge([report], self.num_failed_starts < self._max_restarts)
        self.num_failed_starts += verdict.is_counted
        return verdict

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
