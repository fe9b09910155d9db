"""Selects the plan of each call of a group with ranks on several hosts."""

from __future__ import annotations

from collections.abc import Iterator

from meshdist.backends.base import Backend, DefaultPlan, Plan
from meshdist.backends.gloo.hier.call_tracker import CallTracker, TrackedPlan
from meshdist.backends.gloo.hier.doubling_and_halving import plan_rounds
from meshdist.backends.gloo.hier.exchanges import AgreedExchange, FullBarrier, FullExchange, HierarchicalExchange
from meshdist.backends.gloo.hier.hierarchy import Hierarchy, HostBackendFactory
from meshdist.backends.gloo.hier.rail import Rail, dissemination_barrier
from meshdist.backends.gloo.hier.reductions import SegmentReduce, TwoLevelReduce, WholeReduce
from meshdist.backends.gloo.hier.scatter_allgather_broadcast import SPREAD_BYTES, ScatterAllgatherBroadcast
from meshdist.backends.gloo.hier.small_allgather import plan_small_allgather
from meshdist.backends.gloo.p2p.remote import RemoteP2P
from meshdist.collectives.dataflow import ReductionSpec, TransferSpec
from meshdist.collectives.definition import definition_of
from meshdist.errors import DistError
from meshdist.runtime.call import Call, Signature
from meshdist.runtime.waiting import Waitable

# Up to this many ranks, every rank sends to all others directly; more use trees and rings.
MOST_AT_ONCE = 8
# Up to this many ranks, all learn the sizes of all blocks.
MOST_EXCHANGING = 32
# Up to this many hosts, the ranks of a rail reduce a share each; more would send too many small frames.
MOST_ON_RAILS = 32
# Up to this total over all ranks, every rank receives all data and reduces for itself. Measured on 2 ranks.
WHOLE_BYTES = 64 << 10


class InterHostCollectives:
    def __init__(self, backend: Backend, remote: RemoteP2P, make_host_backend: HostBackendFactory) -> None:
        self._backend = backend
        hosts = backend.options.hosts()
        one_each = len(hosts) == backend.size
        self._tracker = CallTracker(backend, remote.transport, remote.receive_state)
        self._rail = Rail(backend, self._tracker, range(backend.size)) if one_each else None
        self._hierarchy = None if one_each else Hierarchy(backend, self._tracker, hosts, make_host_backend)

    def connect(self) -> Iterator[Waitable]:
        return iter(()) if self._hierarchy is None else self._hierarchy.connect()

    def is_behind(self) -> bool:
        local = None if self._hierarchy is None else self._hierarchy.local
        return (local is not None and local.is_behind()) or self._tracker.is_behind()

    def give_up(self, error: DistError) -> None:
        self._tracker.publish_completed()
        if self._hierarchy is not None:
            self._hierarchy.give_up(error)

    def close(self) -> None:
        self._tracker.publish_completed()
        if self._hierarchy is not None:
            self._hierarchy.close()

    def plan(self, call: Call) -> Plan:
        backend = self._backend
        return TrackedPlan(self._native(call) or DefaultPlan(backend, call), backend, call, self._tracker)

    def _native(self, call: Call) -> Plan | None:
        if self._hierarchy is not None:
            return self._plan_hierarchical(self._hierarchy, call)
        rail = self._rail
        assert rail is not None
        backend, tracker = self._backend, self._tracker
        if call.collective.native == "barrier" and rail.size <= MOST_AT_ONCE:
            return FullBarrier(rail, tracker, backend, call)
        spec = _spec(call)
        if spec is None:
            return None
        if isinstance(spec, ReductionSpec):
            if rail.size > MOST_AT_ONCE:
                return plan_rounds(rail, tracker, backend, call) if spec.reduces_for_all else None
            if not spec.keeps and spec.put_bytes * (rail.size - 1) <= WHOLE_BYTES:
                return WholeReduce(rail, tracker, backend, call, wanted=spec.taker in (None, call.rank))
            return SegmentReduce(rail, tracker, backend, call, spec)
        if rail.size > MOST_AT_ONCE:
            return None
        if spec.longest is None:
            return AgreedExchange(rail, tracker, backend, call, spec)
        if spec.giver is not None and spec.shared and rail.size > 2 and spec.longest >= SPREAD_BYTES:
            return ScatterAllgatherBroadcast(rail, tracker, backend, call)
        return FullExchange(rail, tracker, backend, call, spec)

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        if self._hierarchy is not None:
            return self._hierarchy.check_in(signature)
        rail = self._rail
        assert rail is not None
        self._tracker.begin(signature, signature.fingerprint)
        rail.begin()
        return dissemination_barrier(rail)

    def _plan_hierarchical(self, hierarchy: Hierarchy, call: Call) -> Plan | None:
        if len(hierarchy.hosts) > MOST_ON_RAILS:
            return None
        spec = _spec(call)
        if len(hierarchy.hosts) <= MOST_AT_ONCE:
            plan = plan_small_allgather(hierarchy, self._backend, call, spec)
            if plan is not None:
                return plan
            if isinstance(spec, TransferSpec) and spec.longest is None and call.size <= MOST_EXCHANGING:
                return HierarchicalExchange(hierarchy, self._backend, call, spec)
        is_all_reduce = isinstance(spec, ReductionSpec) and spec.reduces_for_all
        return TwoLevelReduce(hierarchy, self._backend, call) if is_all_reduce else None


def _spec(call: Call) -> TransferSpec | ReductionSpec | None:
    describe = definition_of(call.collective).dataflow.spec
    return None if describe is None else describe(call)
