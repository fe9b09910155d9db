"""Run a job on several hosts: the launchers share their state through a store.

In each start of the ranks, the first launcher with a problem sets the key `stop`, and all others wait for it. All end
their ranks, report how these ended, and follow the verdict of the launcher that keeps the store. If a launcher is
killed or disconnected, the store sets its keys (`TCPStore.set_last_will`).

In an elastic job the launcher that keeps the store makes a new plan for each start, from the launchers that are there.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable

from meshdist.errors import DistError, DistNetworkError, DistStoreError, DistTimeoutError
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.job_verdict import Nodes, Report, Stop, Verdict, judge, judge_elastic
from meshdist.launch.launchers_store import (
    arrived,
    await_key,
    await_sign_offs,
    has_left,
    last_will,
    ranks_secret,
    seat_key,
    sign_off,
)
from meshdist.launch.node_numbering import Plan
from meshdist.launch.node_rendezvous import Met, publish
from meshdist.launch.worker_env import Job, new_job
from meshdist.store import Store, TCPStore
from meshdist.system.deadline import Deadline

_SLICE_S = 0.25
_LISTEN_S = 3600.0
_REPORTS_S = 30.0
_SIGN_OFF_S = 5.0
_JOIN_S = 2.0
_GONE = "is lost: its launcher was killed, or the network to it is cut"


class SeveralNodes(Nodes):
    """This host and others, whose launchers have met; `interrupts`, the signals to this one, end any wait.

    The launcher that leads knows the `master_port` of the ranks' store, 0 for any.
    """

    def __init__(self, met: Met, interrupts: Interrupts, master_port: int, grace_s: float) -> None:
        self.launcher = met.number
        self.first_start = met.start
        self._met = met
        self._store = met.store
        self._interrupts = interrupts
        self._master_port = master_port
        self._timeout_s = 2 * grace_s + _REPORTS_S
        self._num_restarts = met.start
        self._ranks_store: TCPStore | None = None
        self._stop: Stop | None = None
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._num_ranks: dict[int, int] = {}  # how many ranks each launcher would start next
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._names: dict[int, str] = {}
        self._follow(met.plan)

    def _follow(self, plan: Plan) -> None:
        self._plan = plan
        self._names.update((launcher, plan.hosts[node]) for node, launcher in enumerate(plan.launchers))
        self.node, self.num_nodes = plan.launchers.index(self.launcher), len(plan.launchers)
        self.num_failed_starts = plan.num_failed_starts

    def begin(self, num_restarts: int) -> Job:
        """Return the ranks to start here, with a new store and a new secret at each start."""
        self._join_threads()
        if num_restarts > self.first_start:
            self._follow(self._next_plan(num_restarts))
        with self._lock:
            self._num_restarts = num_restarts
            self._stop = None
            self._is_stopped.clear()
        self._verdict = None
        self._set_last_will(num_restarts)
        self._store.set(f"ready/{num_restarts}/{self.launcher}", "")
        plan, host = self._plan, self._met.rendezvous.host
        secret = ranks_secret(self._met.secret, plan.nonce, num_restarts)
        if self._met.leads:
            self._open_ranks_store(secret, self._await_ready())
        else:
            self._await(f"port/{num_restarts}")
        port, problem = json.loads(self._store.get(f"port/{num_restarts}"))
        if problem:
            raise DistError(problem)
        if not self._met.leads:
            self._join_ranks_store(host, port, secret)
        self._start_thread(self._listen)
        if self._met.arrivals is not None:
            self._start_thread(self._watch_for_newcomers)
        return new_job(plan.world_size, secret, host, port, plan.run_id)._replace(
            first_rank=plan.first_rank(self.node),
            num_local=plan.num_ranks[self.node],
            node=self.node,
            num_nodes=self.num_nodes,
            num_restarts=num_restarts,
            num_failed_starts=plan.num_failed_starts,
            max_restarts=plan.max_restarts,
        )

    def _next_plan(self, start: int) -> Plan:
        """Return the plan of a restart: that of the launcher that leads."""
        before, arrivals = self._plan, self._met.arrivals
        if not self._met.leads:
            limit = Deadline(self._met.rendezvous.timeout_s + 1.5 * self._timeout_s)
            await_key(self._store, f"plan/{start}", self._interrupts, limit)
            plan = Plan.decode(self._store.get(f"plan/{start}"))
        else:
            launchers, problem = before.launchers, ""
            if arrivals is not None:
                arrivals.dismiss(self._verdict.leaving if self._verdict is not None else ())
                staying = [launcher for launcher in launchers if launcher in arrivals.there()]
                try:
                    launchers = arrivals.gather(staying, self._interrupts, Deadline(self._met.rendezvous.timeout_s))
                except DistTimeoutError as error:
                    problem = str(error)
            hosts = dict(zip(before.launchers, before.hosts, strict=True))
            cards = arrivals.cards if arrivals is not None else {}
            plan = before._replace(
                launchers=launchers,
                num_ranks=[self._num_ranks.get(each) or cards[each].num_ranks for each in launchers],
                hosts=[cards[each].host if each in cards else hosts[each] for each in launchers],
                problem=problem,
                num_failed_starts=self.num_failed_starts,
            )
            publish(self._store, start, plan, sorted(set(launchers) - set(before.launchers)))
        if plan.problem:
            raise DistError(plan.problem)
        if self.launcher not in plan.launchers:
            raise DistError("the job goes on without this host, which did not report in time that its ranks had ended")
        return plan

    @property
    def ranks_store(self) -> Store:
        assert self._ranks_store is not None
        return self._ranks_store

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
                self.stop(Stop(self.launcher))
        while not self._is_stopped.wait(_SLICE_S) and not self._interrupts.pending():
            pass

    def conclude(self, report: Report) -> Verdict:
        """Report to the launcher that leads, and return its verdict on all reports."""
        verdict_key = f"verdict/{self._num_restarts}"
        try:
            self._store.set(f"report/{self._num_restarts}/{self.launcher}", report.encode())
            if self._met.leads:
                self._store.set(verdict_key, self._judge().encode())
            else:
                self._await(verdict_key)
            verdict = Verdict.decode(self._store.get(verdict_key))
        except DistNetworkError as error:
            return Verdict(False, 1, self._plan.leader, problem=report.problem or self._store_lost(error))
        self._verdict = verdict
        self.num_failed_starts += verdict.is_counted
        return verdict._replace(is_restart=verdict.is_restart and self.launcher not in verdict.leaving)

    def close(self) -> None:
        """Leave the other launchers; the one that leads first waits until they have read the verdict."""
        self._is_closed = True
        with contextlib.suppress(DistError):  # the one that leads may be gone
            if self._met.leads:
                self._end_job()
            elif self._verdict is not None:
                sign_off(self._store, self.launcher)
                self._met.lifeline.set_last_will({})
        self._is_stopped.set()
        for store in (self._met.lifeline, self._store, self._ranks_store):
            if store is not None:
                store.close()
        self._join_threads()

    def _end_job(self) -> None:
        """Tell all launchers, those that wait for a place too, that the job has ended; wait until they know."""
        self._store.set("over", "")
        stop = self._stop or Stop(self.launcher, problem="has given up")
        verdict = judge([Report(stop.launcher, signal=stop.signal, problem=stop.problem)], may_restart=False)
        verdict = Verdict.decode(self._store.compare_set(f"verdict/{self._num_restarts}", "", verdict.encode()))
        others = [number for number in arrived(self._store) if number != self.launcher]
        for number in others:
            self._store.compare_set(seat_key(number), "", json.dumps({"ended": verdict.status}))
        await_sign_offs(self._store, others, _SIGN_OFF_S)

    def node_of(self, launcher: int) -> int | None:
        return self._plan.launchers.index(launcher) if launcher in self._plan.launchers else None

    def describe(self, launcher: int) -> str:
        return f"node {self.node_of(launcher)} ({self._names.get(launcher, '?')})"

    def _set_last_will(self, num_restarts: int) -> None:
        """Let the store set these keys if this launcher disconnects in this start."""
        stop, report = (kind(self.launcher, problem=_GONE).encode() for kind in (Stop, Report))
        keys = {f"stop/{num_restarts}": stop, f"report/{num_restarts}/{self.launcher}": report}
        self._met.lifeline.set_last_will({**keys, **last_will(self.launcher)})

    def _await_ready(self) -> str:
        """Wait until all launchers have set their last will; return the problem if one left before the job began."""
        deadline = Deadline(self._timeout_s)
        for launcher in self._plan.launchers:
            key = f"ready/{self._num_restarts}/{launcher}"
            while not self._store.check([key]):
                if self._store.check(["lost"]):
                    return self._store.get("lost").decode()
                if has_left(self._store, launcher):
                    self._speak_for(launcher)
                    break
                if deadline.expired():
                    host = self._names[launcher]
                    return f"the launcher on {host} did not begin within {deadline.timeout_s:g} s"
                with contextlib.suppress(DistStoreError):
                    await_key(self._store, key, self._interrupts, Deadline(deadline.slice_s(_SLICE_S)))
        return ""

    def _speak_for(self, launcher: int) -> None:
        """Set what a launcher would have left if it had set its last will before it was lost."""
        start = self._num_restarts
        self._store.set(f"report/{start}/{launcher}", Report(launcher, problem=_GONE).encode())
        self._store.compare_set(f"stop/{start}", "", Stop(launcher, problem=_GONE).encode())

    def _join_ranks_store(self, host: str, port: int, secret: str) -> None:
        """Connect to the ranks' store, which shows what the launchers know of the ranks to `meshrun status`."""
        if self._ranks_store is not None:
            self._ranks_store.close()
        self._ranks_store = TCPStore(
            host, port, wait_for_workers=False, timeout=self._timeout_s, secret=secret.encode()
        )

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
            problem = f"the ranks' store on {self._plan.hosts[self.node]}: {error}"
        self._store.set(f"port/{self._num_restarts}", json.dumps([port, problem]))

    def _await(self, key: str) -> None:
        await_key(self._store, key, self._interrupts, Deadline(1.5 * self._timeout_s))

    def _start_thread(self, target: Callable[[int], None]) -> None:
        thread = threading.Thread(
            target=target, args=(self._num_restarts,), name=f"meshrun{target.__name__}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _join_threads(self) -> None:
        while self._threads:
            self._threads.pop().join(_JOIN_S)

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
                stop = Stop(self._plan.leader, problem=self._store_lost(error))
            except DistStoreError:  # no stop yet, or this launcher has closed the store
                if self._is_closed:
                    return
        self._note_stop(num_restarts, stop)

    def _watch_for_newcomers(self, num_restarts: int) -> None:
        """In the launcher that leads an elastic job: end this start for hosts that have come, unless it ends."""
        assert self._met.arrivals is not None
        with contextlib.suppress(DistStoreError, DistNetworkError):  # this launcher has closed the store
            hosts = self._met.arrivals.newcomers(self._plan.launchers, self._is_stopped)
            if hosts and not self._store.check([f"well/{num_restarts}"]):
                self.stop(Stop(self.launcher, newcomers=hosts))

    def _note_stop(self, num_restarts: int, stop: Stop) -> None:
        with self._lock:  # a stop of the start before may arrive late
            if num_restarts == self._num_restarts and self._stop is None:
                self._stop = stop
                self._is_stopped.set()

    def _store_lost(self, error: Exception) -> str:
        return f"keeps the store of the launchers, which is gone: {error}"

    def _judge(self) -> Verdict:
        """Wait for the reports of all hosts, and return the verdict."""
        plan, reports = self._plan, list[Report]()
        deadline = Deadline(self._timeout_s)
        for launcher in plan.launchers:
            key = f"report/{self._num_restarts}/{launcher}"
            try:
                await_key(self._store, key, self._interrupts, deadline)
                reports.append(Report.decode(self._store.get(key)))
            except DistStoreError:
                reports.append(
                    Report(launcher, problem=f"did not report within {deadline.timeout_s:g} s that its ranks had ended")
                )
            if self._stop is not None and self._stop.problem and self._stop.launcher == launcher:
                reports[-1] = reports[-1]._replace(problem=self._stop.problem)  # in its own words
        self._num_ranks = {report.launcher: report.num_ranks for report in reports}
        first = None if self._stop is None else self._stop.launcher
        may_restart = self.num_failed_starts < plan.max_restarts
        if self._met.arrivals is None:
            verdict = judge(reports, may_restart, first)
        else:
            least = self._met.rendezvous.least_nodes or 1
            has_newcomers = bool(self._stop is not None and self._stop.newcomers)
            verdict = judge_elastic(reports, may_restart, self.launcher, least, has_newcomers, first)
        return verdict
