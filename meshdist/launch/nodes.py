"""The hosts of a job, as the launcher on one of them sees them: what to start, what the others tell, how it ended."""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from meshdist.exit_status import INTERRUPT_BASE, shell_status
from meshdist.launch.env import Job, job_secret, new_job
from meshdist.launch.failures import Failure, first_cause
from meshdist.store import TCPStore


class Stop(NamedTuple):
    """Why the ranks of all hosts are to end.

    Attributes:
        node: The host on which that came up.
        failure: The rank that failed there, if one did.
        signal: The number of the signal that its launcher got, 0 for none.
        problem: What went wrong with the launcher itself, empty if nothing did.

    Example:
        >>> Stop.decode(Stop(node=1, problem="no more processes").encode())
        Stop(node=1, failure=None, signal=0, problem='no more processes')
    """

    node: int
    failure: Failure | None = None
    signal: int = 0
    problem: str = ""

    @property
    def is_success(self) -> bool:
        """True if all ranks of all hosts have ended well."""
        return self.failure is None and not self.signal and not self.problem

    def encode(self) -> str:
        """Return it as text for the other launchers."""
        return json.dumps({**self._asdict(), "failure": self.failure and self.failure._asdict()})

    @classmethod
    def decode(cls, text: bytes | str) -> Stop:
        """Return what `encode` made `text` of."""
        said = json.loads(text)
        return cls(**{**said, "failure": said["failure"] and Failure(**said["failure"])})


class Report(NamedTuple):
    """How one start of the ranks ended on one host.

    Attributes:
        node: The host.
        failures: The ranks that failed.
        signal: The signal that ended the launcher there, 0 for none.
        problem: Why the launcher there could not go on, empty if it could.

    Example:
        >>> Report.decode(Report(node=0).encode()).failures
        []
    """

    node: int
    failures: list[Failure] = []  # noqa: RUF012 - never changed
    signal: int = 0
    problem: str = ""

    def encode(self) -> str:
        """Return it as text for the other launchers."""
        return json.dumps({**self._asdict(), "failures": [failure._asdict() for failure in self.failures]})

    @classmethod
    def decode(cls, text: bytes | str) -> Report:
        """Return what `encode` made `text` of."""
        said = json.loads(text)
        return cls(**{**said, "failures": [Failure(**each) for each in said["failures"]]})


class Verdict(NamedTuple):
    """What all launchers do next.

    Attributes:
        is_restart: Start all ranks again.
        status: Else, exit with this status.
        node: The host where the cause came up.
        cause: The rank that failed first, if one did.
        problem: Why the job cannot go on, if not because of a rank.

    Example:
        >>> judge([Report(node=0), Report(node=1)], may_restart=True)
        Verdict(is_restart=False, status=0, node=0, cause=None, problem='')
    """

    is_restart: bool
    status: int
    node: int = 0
    cause: Failure | None = None
    problem: str = ""

    def encode(self) -> str:
        """Return it as text for the other launchers."""
        return json.dumps({**self._asdict(), "cause": self.cause and self.cause._asdict()})

    @classmethod
    def decode(cls, text: bytes | str) -> Verdict:
        """Return what `encode` made `text` of."""
        said = json.loads(text)
        return cls(**{**said, "cause": said["cause"] and Failure(**said["cause"])})


def judge(reports: Iterable[Report], may_restart: bool) -> Verdict:
    """Return what to do after a start of the ranks has ended as `reports` say, one from each host.

    A signal and a launcher that cannot go on end the job; failed ranks do unless `may_restart`.
    """
    reports = list(reports)
    for report in reports:
        if report.signal:
            name = signal.Signals(report.signal).name
            return Verdict(False, INTERRUPT_BASE + report.signal, report.node, problem=f"was ended by {name}")
    for report in reports:
        if report.problem:
            return Verdict(False, 1, report.node, problem=report.problem)
    by_node = [(failure, report.node) for report in reports for failure in report.failures]
    if not by_node:
        return Verdict(False, 0)
    cause = first_cause(failure for failure, _ in by_node)
    return Verdict(may_restart, shell_status(cause.status), dict(by_node)[cause], cause)


class Nodes(ABC):
    """The hosts of a job.

    Attributes:
        node: The number of this one.
        num_nodes: How many there are.
    """

    node = 0
    num_nodes = 1

    @abstractmethod
    def begin(self, num_restarts: int) -> Job:
        """Return what to start here; its store is there.

        Raises:
            DistError: The store cannot be had.
        """

    @abstractmethod
    def stopped(self) -> Stop | None:
        """Return why the ranks of this start are to end, None as long as they may go on."""

    @abstractmethod
    def stop(self, stop: Stop) -> Stop:
        """Have the ranks of all hosts end; return why, which may be what another host said before."""

    @abstractmethod
    def wait_for_others(self) -> None:
        """Return when the ranks of all hosts have ended, those here well; or at a signal to this launcher."""

    @abstractmethod
    def conclude(self, report: Report) -> Verdict:
        """Tell how this start ended here, and return what all hosts do next."""

    @abstractmethod
    def close(self) -> None:
        """Give back the store."""

    def describe(self, node: int) -> str:
        """Return what messages call a host."""
        return f"node {node}"


class OneNode(Nodes):
    """This host alone.

    Args:
        num_ranks: How many ranks to start.
        master_addr: Where the store listens.
        master_port: Its port, 0 for any.
        max_restarts: How often to start failed ranks again.
        run_id: Names the job; made up where None.

    Example:
        >>> nodes = OneNode(num_ranks=2, master_addr="127.0.0.1")
        >>> nodes.begin(num_restarts=0).world_size
        2
        >>> nodes.close()
    """

    def __init__(
        self,
        num_ranks: int,
        master_addr: str,
        master_port: int = 0,
        max_restarts: int = 0,
        run_id: str | None = None,
    ) -> None:
        self._num_ranks = num_ranks
        self._address = master_addr, master_port
        self._max_restarts = max_restarts
        self._run_id = run_id
        self._num_restarts = 0
        self._store: TCPStore | None = None
        self._stop: Stop | None = None

    def begin(self, num_restarts: int) -> Job:
        """Return what to start: with a new store and, unless the user gave one, a new secret each time."""
        self.close()
        self._num_restarts, self._stop = num_restarts, None
        secret = job_secret()
        self._store = TCPStore(*self._address, is_master=True, wait_for_workers=False, secret=secret.encode())
        job = new_job(self._num_ranks, secret, self._address[0], self._store.port, self._run_id)
        self._run_id = job.run_id
        return job._replace(num_restarts=num_restarts, max_restarts=self._max_restarts)

    def stopped(self) -> Stop | None:
        """Return what `stop` was told."""
        return self._stop

    def stop(self, stop: Stop) -> Stop:
        """Note it; there is nobody to tell."""
        self._stop = stop
        return stop

    def wait_for_others(self) -> None:
        """Return: there are no others."""
        self._stop = Stop(self.node)

    def conclude(self, report: Report) -> Verdict:
        """Return what to do next."""
        return judge([report], self._num_restarts < self._max_restarts)

    def close(self) -> None:
        """End the store."""
        if self._store is not None:
            self._store.close()
            self._store = None
