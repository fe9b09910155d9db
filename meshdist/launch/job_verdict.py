"""The hosts of a job, as the launcher on one of them sees them: what to start, why to stop, how the job ended."""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from meshdist.launch.failures import Failure, first_cause
from meshdist.launch.worker_env import Job, job_secret, new_job
from meshdist.store import TCPStore
from meshdist.system.processes import INTERRUPT_BASE, shell_status


class Stop(NamedTuple):
    """Why the ranks of all hosts must end."""

    node: int  # the host of the problem
    failure: Failure | None = None  # the rank that failed there, if one did
    signal: int = 0  # the number of the signal to its launcher, 0 for none
    problem: str = ""  # the problem of the launcher itself, empty if none

    @property
    def is_success(self) -> bool:
        """True if all ranks of all hosts have succeeded."""
        return self.failure is None and not self.signal and not self.problem

    def encode(self) -> str:
        return json.dumps({**self._asdict(), "failure": self.failure and self.failure._asdict()})

    @classmethod
    def decode(cls, text: bytes | str) -> Stop:
        fields = json.loads(text)
        return cls(**{**fields, "failure": fields["failure"] and Failure(**fields["failure"])})


class Report(NamedTuple):
    """How one start of the ranks ended on one host."""

    node: int
    failures: list[Failure] = []  # noqa: RUF012 - never changed
    signal: int = 0  # the signal that ended the launcher there, 0 for none
    problem: str = ""  # the problem of the launcher there, empty if none

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
    node: int = 0  # the host of the cause
    cause: Failure | None = None  # the rank that failed first, if one did
    problem: str = ""  # why the job cannot go on, other than a failed rank

    def encode(self) -> str:
        return json.dumps({**self._asdict(), "cause": self.cause and self.cause._asdict()})

    @classmethod
    def decode(cls, text: bytes | str) -> Verdict:
        fields = json.loads(text)
        return cls(**{**fields, "cause": fields["cause"] and Failure(**fields["cause"])})


def judge(reports: Iterable[Report], may_restart: bool, first_node: int | None = None) -> Verdict:
    """Return what to do next, given one report from each host.

    A signal or a problem of a launcher ends the job; failed ranks do so unless `may_restart`. The clocks of hosts may
    differ: where ranks have failed on several hosts, the cause is on `first_node`, whose stop came first.
    """
    reports = list(reports)
    for report in reports:
        if report.signal:
            name = signal.Signals(report.signal).name
            return Verdict(False, INTERRUPT_BASE + report.signal, report.node, problem=f"was stopped by {name}")
    for report in reports:
        if report.problem:
            return Verdict(False, 1, report.node, problem=report.problem)
    causes = [(first_cause(report.failures), report.node) for report in reports if report.failures]
    if not causes:
        return Verdict(False, 0)
    cause, node = min(causes, key=lambda one: (one[0].secondary, one[1] != first_node, one[0].time_s))
    return Verdict(may_restart, shell_status(cause.status), node, cause)


class Nodes(ABC):
    """The hosts of a job; this one is number `node` of `num_nodes`."""

    node = 0
    num_nodes = 1

    @abstractmethod
    def begin(self, num_restarts: int) -> Job:
        """Return the ranks to start here; their store exists.

        Raises:
            DistError: The store cannot be opened or reached.
        """

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

    def describe(self, node: int) -> str:
        """Return the name of a host for messages."""
        return f"node {node}"


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
        return job._replace(num_restarts=num_restarts, max_restarts=self._max_restarts)

    def stopped(self) -> Stop | None:
        return self._stop

    def stop(self, stop: Stop) -> Stop:
        self._stop = stop
        return stop

    def wait_for_others(self) -> None:
        self._stop = Stop(self.node)

    def conclude(self, report: Report) -> Verdict:
        return judge([report], self._num_restarts < self._max_restarts)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
