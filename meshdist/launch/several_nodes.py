"""Run a job on several hosts: the launchers share their state through a store.

In each start of the ranks, the first launcher with a problem sets the key `stop`, and all others wait for it. All end
their ranks, report how these ended, and follow the verdict of the launcher that keeps the store. If a launcher is
killed or disconnected, the store sets its keys (`TCPStore.set_last_will`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import threading

from meshdist.errors import DistError, DistNetworkError, DistStoreError
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.job_verdict import Nodes, Report, Stop, Verdict, judge
from meshdist.launch.node_rendezvous import Met, await_all, await_key, await_sign_offs, last_will, sign_off
from meshdist.launch.worker_env import Job, new_job
from meshdist.store import TCPStore
from meshdist.system.deadline import Deadline

_SLICE_S = 0.25
_LISTEN_S = 3600.0
_REPORTS_S = 30.0
_SIGN_OFF_S = 5.0
_JOIN_S = 2.0


class SeveralNodes(Nodes):
    """This host and others, whose launchers have met; `interrupts`, the signals to this one, end any wait.

    The launcher that leads knows the `master_port` of the ranks' store, 0 for any.
    """

    def __init__(self, met: Met, interrupts: Interrupts, master_port: int, grace_s: float) -> None:
        self.node = met.node
        self.num_nodes = len(met.plan.nodes)
        self._met = met
        self._store = met.store
        self._interrupts = interrupts
        self._master_port = master_port
        self._timeout_s = 2 * grace_s + _REPORTS_S
        self._num_restarts = 0
        self._ranks_store: TCPStore | None = None
        self._stop: Stop | None = None
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self._is_concluded = False
        self._is_closed = False
        self._listener: threading.Thread | None = None

    def begin(self, num_restarts: int) -> Job:
        """Return the ranks to start here, with a new store and a new secret at each start."""
        with self._lock:
            self._num_restarts = num_restarts
            self._stop = None
            self._is_stopped.clear()
        self._is_concluded = False
        self._set_last_will(num_restarts)
        self._store.set(f"ready/{self.node}", "")
        plan, host = self._met.plan, self._met.rendezvous.host
        secret = self._ranks_secret()
        if self._met.leads:
            self._open_ranks_store(secret, "" if num_restarts else self._await_ready())
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
        """Return the first stop of this start, from any launcher."""
        return self._stop

    def stop(self, stop: Stop) -> Stop:
        """Stop all launchers; return the stop that came first, from another launcher or this one."""
        with contextlib.suppress(DistNetworkError):  # the listener reports a lost store
            stop = Stop.decode(self._store.compare_set(f"stop/{self._num_restarts}", "", stop.encode()))
        self._note_stop(self._num_restarts, stop)
        return stop

    def wait_for_others(self) -> None:
        """Report that all ranks here have succeeded, and wait for the other hosts, or a signal."""
        with contextlib.suppress(DistNetworkError):  # the listener reports it
            if self._store.add(f"well/{self._num_restarts}", 1) == self.num_nodes:
                self.stop(Stop(self.node))
        while not self._is_stopped.wait(_SLICE_S) and not self._interrupts.pending():
            pass

    def conclude(self, report: Report) -> Verdict:
        """Report to the launcher that leads, and return its verdict on all reports."""
        if self._stop is not None and self._stop.problem and not report.problem:
            report = report._replace(node=self._stop.node, problem=self._stop.problem)
        verdict_key = f"verdict/{self._num_restarts}"
        try:
            self._store.set(f"report/{self._num_restarts}/{self.node}", report.encode())
            if self._met.leads:
                self._store.set(verdict_key, self._judge().encode())
            else:
                self._await(verdict_key)
            verdict = Verdict.decode(self._store.get(verdict_key))
        except DistNetworkError as error:
            return Verdict(False, 1, self._met.plan.leader, problem=report.problem or self._store_lost(error))
        self._is_concluded = True
        return verdict

    def close(self) -> None:
        """Leave the other launchers; the one that leads first waits until they have read the verdict."""
        self._is_closed = True
        with contextlib.suppress(DistError):  # the one that leads may be gone
            if self._met.leads:
                self._store.set("over", "")
                stop = self._stop or Stop(self.node, problem="has given up")
                verdict = judge([Report(stop.node, signal=stop.signal, problem=stop.problem)], may_restart=False)
                self._store.compare_set(f"verdict/{self._num_restarts}", "", verdict.encode())
                others = [number for number in range(self.num_nodes) if number != self._met.number]
                await_sign_offs(self._store, others, _SIGN_OFF_S)
            elif self._is_concluded:
                sign_off(self._store, self._met.number)
                self._met.lifeline.set_last_will({})
        for store in (self._met.lifeline, self._store, self._ranks_store):
            if store is not None:
                store.close()
        if self._listener is not None:
            self._listener.join(_JOIN_S)

    def describe(self, node: int) -> str:
        return f"node {node} ({self._met.plan.hosts[node]})"

    def _set_last_will(self, num_restarts: int) -> None:
        """Let the store set these keys if this launcher disconnects in this start or before the next."""
        problem = "was killed, or the network to it is cut"
        stop, report = Stop(self.node, problem=problem).encode(), Report(self.node, problem=problem).encode()
        keys = {}
        for start in (num_restarts, num_restarts + 1):
            keys.update({f"stop/{start}": stop, f"report/{start}/{self.node}": report})
        self._met.lifeline.set_last_will({**keys, **last_will(self._met.number)})

    def _ranks_secret(self) -> str:
        """Return the secret of this start of the ranks, derived from the launchers' own, so that it is not sent."""
        about = f"ranks of {self._met.plan.nonce}, start {self._num_restarts}"
        return hmac.digest(self._met.secret, about.encode(), "sha256").hex()

    def _await_ready(self) -> str:
        """Wait until all launchers have set their last will; return the problem if one disconnected before."""
        deadline = Deadline(self._timeout_s)
        keys = [f"ready/{node}" for node in range(self.num_nodes)]
        while not self._store.check(["lost"]):
            try:
                await_all(self._store, keys, self._interrupts, Deadline(deadline.slice_s(_SLICE_S)))
            except DistStoreError:
                if deadline.expired():
                    raise
            else:
                return ""
        return self._store.get("lost").decode()

    def _open_ranks_store(self, secret: str, problem: str) -> None:
        """Open a new store for the ranks, and publish its port, or the problem."""
        if self._ranks_store is not None:
            self._ranks_store.close()
        host, port = self._met.rendezvous.host, 0
        try:
            self._ranks_store = TCPStore(
                host, self._master_port, is_master=True, wait_for_workers=False, secret=secret.encode()
            )
            port = self._ranks_store.port
        except DistError as error:
            problem = f"the ranks' store on {self._met.plan.hosts[self.node]}: {error}"
        self._store.set(f"port/{self._num_restarts}", json.dumps([port, problem]))

    def _await(self, key: str) -> None:
        await_key(self._store, key, self._interrupts, Deadline(1.5 * self._timeout_s))

    def _listen(self, num_restarts: int) -> None:
        """Wait for the stop of this start of the ranks."""
        key = f"stop/{num_restarts}"
        stop: Stop | None = None
        while stop is None:
            try:
                self._store.wait([key], _LISTEN_S)
                stop = Stop.decode(self._store.get(key))
            except DistNetworkError as error:
                if self._is_closed:
                    return
                stop = Stop(self._met.plan.leader, problem=self._store_lost(error))
            except DistStoreError:  # no stop yet, or this launcher has closed the store
                if self._is_closed:
                    return
        self._note_stop(num_restarts, stop)

    def _note_stop(self, num_restarts: int, stop: Stop) -> None:
        with self._lock:  # a stop of the start before may arrive late
            if num_restarts == self._num_restarts and self._stop is None:
                self._stop = stop
                self._is_stopped.set()

    def _store_lost(self, error: Exception) -> str:
        return f"keeps the store of the launchers, which is gone: {error}"

    def _judge(self) -> Verdict:
        """Wait for the reports of all hosts, and return the verdict."""
        plan, reports = self._met.plan, list[Report]()
        deadline = Deadline(self._timeout_s)
        for node in range(self.num_nodes):
            key = f"report/{self._num_restarts}/{node}"
            try:
                await_key(self._store, key, self._interrupts, deadline)
                reports.append(Report.decode(self._store.get(key)))
            except DistStoreError:
                reports.append(
                    Report(node, problem=f"did not report within {deadline.timeout_s:g} s that its ranks had ended")
                )
        first_node = None if self._stop is None else self._stop.node
        return judge(reports, self._num_restarts < plan.max_restarts, first_node)
