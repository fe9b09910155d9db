"""The hosts of a job on several of them: their launchers tell each other what happens through a store.

In each start of the ranks, the first launcher on which something goes wrong sets one key, `stop`, for which all others
wait. All end their ranks, report how these ended, and do what the launcher that keeps the store concludes from that.
Of a launcher that is killed or cut off, the store itself sets the keys (`TCPStore.bequeath`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import threading

from meshdist.deadline import Deadline
from meshdist.errors import DistError, DistNetworkError, DistStoreError
from meshdist.launch.env import Job, new_job
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.meeting import Met, await_all, await_farewells, await_key, last_words, say_farewell
from meshdist.launch.nodes import Nodes, Report, Stop, Verdict, judge
from meshdist.store import TCPStore

_SLICE_S = 0.25
_LISTEN_S = 3600.0
_REPORTS_S = 30.0
_LAST_WORDS_S = 5.0
_JOIN_S = 2.0


class SeveralNodes(Nodes):
    """This host and others, whose launchers have met.

    Args:
        met: What they agreed on.
        interrupts: The signals that this launcher gets, which end any wait.
        master_port: On the launcher that leads: the port of the ranks' store, 0 for any.
        grace_s: How long the ranks may take to end.

    Example:
        >>> from meshdist.launch.meeting import Meeting, meet
        >>> with Interrupts() as interrupts:
        ...     met = meet(Meeting("127.0.0.1", 0, num_nodes=1, node=0), 4, 0, interrupts)
        ...     nodes = SeveralNodes(met, interrupts, master_port=0, grace_s=1.0)
        ...     job = nodes.begin(num_restarts=0)
        ...     nodes.close()
        >>> job.world_size, job.node
        (4, 0)
    """

    def __init__(self, met: Met, interrupts: Interrupts, master_port: int, grace_s: float) -> None:
        self.node = met.node
        self.num_nodes = len(met.plan.nodes)
        self._met = met
        self._store = met.store
        self._interrupts = interrupts
        self._master_port = master_port
        self._patience_s = 2 * grace_s + _REPORTS_S
        self._num_restarts = 0
        self._ranks_store: TCPStore | None = None
        self._told: Stop | None = None
        self._is_told = threading.Event()
        self._lock = threading.Lock()
        self._is_concluded = False
        self._is_closed = False
        self._listener: threading.Thread | None = None

    def begin(self, num_restarts: int) -> Job:
        """Return what to start here: with a new store, and a new secret, at each start of the ranks."""
        with self._lock:
            self._num_restarts = num_restarts
            self._told = None
            self._is_told.clear()
        self._is_concluded = False
        self._leave_word(num_restarts)
        self._store.set(f"ready/{self.node}", "")
        plan, host = self._met.plan, self._met.meeting.host
        secret = self._ranks_secret()
        if self._met.leads:
            self._open_ranks_store(secret, "" if num_restarts else self._who_has_gone_early())
        else:
            self._await(f"port/{num_restarts}")
        port, problem = json.loads(self._store.get(f"port/{num_restarts}"))
        if problem:
            raise DistError(problem)
        self._listener = threading.Thread(
            target=self._listen, args=(num_restarts,), name="meshrun-listener", daemon=True
        )
        self._listener.start()
        return new_job(plan.world_size, secret, host, port, plan.run_id)._replace(
            first_rank=plan.first_rank(self.node),
            num_local=plan.num_ranks[self.node],
            node=self.node,
            num_nodes=self.num_nodes,
            num_restarts=num_restarts,
            max_restarts=plan.max_restarts,
        )

    def stopped(self) -> Stop | None:
        """Return what a launcher told first, this one or another."""
        return self._told

    def stop(self, stop: Stop) -> Stop:
        """Tell all launchers; return what one of them told before, or this."""
        with contextlib.suppress(DistNetworkError):  # then there is nobody to tell, and the listener knows it
            stop = Stop.decode(self._store.compare_set(f"stop/{self._num_restarts}", "", stop.encode()))
        self._hear(self._num_restarts, stop)
        return stop

    def wait_for_others(self) -> None:
        """Say that all ranks here have ended well, and wait for the others, or a signal."""
        with contextlib.suppress(DistNetworkError):  # the listener tells
            if self._store.add(f"well/{self._num_restarts}", 1) == self.num_nodes:
                self.stop(Stop(self.node))
        while not self._is_told.wait(_SLICE_S) and not self._interrupts.pending():
            pass

    def conclude(self, report: Report) -> Verdict:
        """Report to the launcher that leads, and return what it concludes from all reports."""
        if self._told is not None and self._told.problem and not report.problem:
            report = report._replace(node=self._told.node, problem=self._told.problem)
        verdict_key = f"verdict/{self._num_restarts}"
        try:
            self._store.set(f"report/{self._num_restarts}/{self.node}", report.encode())
            if self._met.leads:
                self._store.set(verdict_key, self._judge().encode())
            else:
                self._await(verdict_key)
            verdict = Verdict.decode(self._store.get(verdict_key))
        except DistNetworkError as error:
            return Verdict(False, 1, self._met.plan.leader, problem=report.problem or self._lost(error))
        self._is_concluded = True
        return verdict

    def close(self) -> None:
        """Leave the other launchers; where this one leads, once they have heard the verdict."""
        self._is_closed = True
        with contextlib.suppress(DistError):  # the one that leads may be gone
            if self._met.leads:
                self._store.set("over", "")
                told = self._told or Stop(self.node, problem="has given up")
                verdict = judge([Report(told.node, signal=told.signal, problem=told.problem)], may_restart=False)
                self._store.compare_set(f"verdict/{self._num_restarts}", "", verdict.encode())
                others = [number for number in range(self.num_nodes) if number != self._met.number]
                await_farewells(self._store, others, _LAST_WORDS_S)
            elif self._is_concluded:
                say_farewell(self._store, self._met.number)
                self._met.lifeline.bequeath({})
        for store in (self._met.lifeline, self._store, self._ranks_store):
            if store is not None:
                store.close()
        if self._listener is not None:
            self._listener.join(_JOIN_S)

    def describe(self, node: int) -> str:
        """Return what messages call a host: its number and its name."""
        return f"node {node} ({self._met.plan.hosts[node]})"

    def _leave_word(self, num_restarts: int) -> None:
        """Have the store say so if this launcher goes, during this start of the ranks or before the next."""
        problem = "was killed, or the network to it is cut"
        stop, report = Stop(self.node, problem=problem).encode(), Report(self.node, problem=problem).encode()
        word = {}
        for start in (num_restarts, num_restarts + 1):
            word.update({f"stop/{start}": stop, f"report/{start}/{self.node}": report})
        self._met.lifeline.bequeath({**word, **last_words(self._met.number)})

    def _ranks_secret(self) -> str:
        """Return the secret of this start of the ranks: made from the launchers' own, it need not be sent."""
        about = f"ranks of {self._met.plan.nonce}, start {self._num_restarts}"
        return hmac.digest(self._met.secret, about.encode(), "sha256").hex()

    def _who_has_gone_early(self) -> str:
        """Wait until all launchers have left their word; return what to say of one that has gone before it could."""
        deadline = Deadline(self._patience_s)
        keys = [f"ready/{node}" for node in range(self.num_nodes)]
        while not self._store.check(["early"]):
            try:
                await_all(self._store, keys, self._interrupts, Deadline(deadline.slice_s(_SLICE_S)))
            except DistStoreError:
                if deadline.expired():
                    raise
            else:
                return ""
        return self._store.get("early").decode()

    def _open_ranks_store(self, secret: str, problem: str) -> None:
        """Keep a new store for the ranks, and tell its port; or tell the problem that there is."""
        if self._ranks_store is not None:
            self._ranks_store.close()
        host, port = self._met.meeting.host, 0
        try:
            self._ranks_store = TCPStore(
                host, self._master_port, is_master=True, wait_for_workers=False, secret=secret.encode()
            )
            port = self._ranks_store.port
        except DistError as error:
            problem = f"the ranks' store on {self._met.plan.hosts[self.node]}: {error}"
        self._store.set(f"port/{self._num_restarts}", json.dumps([port, problem]))

    def _await(self, key: str) -> None:
        await_key(self._store, key, self._interrupts, Deadline(1.5 * self._patience_s))

    def _listen(self, num_restarts: int) -> None:
        """Wait for the word that stops this start of the ranks."""
        key = f"stop/{num_restarts}"
        told: Stop | None = None
        while told is None:
            try:
                self._store.wait([key], _LISTEN_S)
                told = Stop.decode(self._store.get(key))
            except DistNetworkError as error:
                if self._is_closed:
                    return
                told = Stop(self._met.plan.leader, problem=self._lost(error))
            except DistStoreError:  # nothing yet, or this launcher has closed the store
                if self._is_closed:
                    return
        self._hear(num_restarts, told)

    def _hear(self, num_restarts: int, told: Stop) -> None:
        with self._lock:  # a word on the start before may be heard late
            if num_restarts == self._num_restarts and self._told is None:
                self._told = told
                self._is_told.set()

    def _lost(self, error: Exception) -> str:
        return f"keeps the store of the launchers, which is gone: {error}"

    def _judge(self) -> Verdict:
        """Wait for the reports of all hosts, and conclude what to do."""
        plan, reports = self._met.plan, list[Report]()
        deadline = Deadline(self._patience_s)
        for node in range(self.num_nodes):
            key = f"report/{self._num_restarts}/{node}"
            try:
                await_key(self._store, key, self._interrupts, deadline)
                reports.append(Report.decode(self._store.get(key)))
            except DistStoreError:
                reports.append(
                    Report(node, problem=f"did not say within {deadline.timeout_s:g} s that its ranks ended")
                )
        return judge(reports, self._num_restarts < plan.max_restarts)
