"""GlooBackend: selects the plan of each call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.base import Backend, Choice, FastPath, Plan, plan_alone
from meshdist.backends.gloo.p2p.p2p import P2P
from meshdist.backends.gloo.published import naming_ended_rank
from meshdist.backends.gloo.shm.barrier_plans import OneStep, StepCopies
from meshdist.backends.gloo.shm.flag_barrier import BarrierWait
from meshdist.backends.gloo.shm.mapping_cache import shared_memory
from meshdist.backends.gloo.shm.move_selection import plan_movement
from meshdist.backends.gloo.shm.reduction import plan_list_reduction, plan_reduction, plan_scan
from meshdist.backends.gloo.shm.shm_group import ShmGroup, shared_segment
from meshdist.backends.group_setup import SetUpWait, withdraw
from meshdist.backends.p2p.own_messages import OwnMessages
from meshdist.collectives.dataflow import ReductionSpec
from meshdist.collectives.definition import Collective, definition_of
from meshdist.collectives.registry import functions
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.call import Buffers, Call, Signature
from meshdist.runtime.departure import PeerExit, gave_up
from meshdist.runtime.doorbells import SocketDoorbells
from meshdist.runtime.waiting import Incoming, Probe, Waitable, spin
from meshdist.system.deadline import Deadline

if TYPE_CHECKING:
    from meshdist.backends.gloo.hier.plans import InterHostCollectives

_DESTROYED_MEANWHILE = "the group was destroyed, by another thread, when this call had begun"


class GlooBackend(Backend):
    """The CPU backend. A group's first collective sets up its shared memory; messages need only the two ranks."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        if not isinstance(options.bells, SocketDoorbells):
            raise ValueError("backend 'gloo' is for ranks that are processes; this rank is a thread of meshdist.run")
        self._shared: ShmGroup | None = None
        self._is_connected = self._is_closed = False
        self._opening = threading.Lock()
        self._p2p: P2P | None = None
        self._inter_host: InterHostCollectives | None = None
        if not options.remote_ranks():  # the rows of the parts go straight through shared memory
            self.least_strided_bytes = 32 << 10
            if self.size > 1:
                self.least_apart_bytes = 4 << 20  # a call of fewer bytes takes longer than the copy that this saves
        if self.size > 1 and options.remote_ranks():
            # Not in the first call, which two threads may carry out in turn: Ctrl-C in an import can leave its locks
            # held, for which the other thread would wait forever. If it fails, the first call does, on all ranks.
            with suppress(OSError, ImportError):
                from meshdist.backends.gloo.hier import plans as plans
                from meshdist.backends.gloo.p2p import remote as remote

    def connect(self) -> Iterator[Waitable]:
        if not self._is_connected and self.size > 1:
            with naming_ended_rank(self.options):
                if self.options.remote_ranks():
                    for waitable in self._make_inter_host().connect():
                        yield SetUpWait(waitable, self.options)
                else:
                    for waitable in self._set_up():
                        yield SetUpWait(waitable, self.options)
            self._is_connected = True

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if self.options.peers.num_ranks == 1:
            return super().empty(shape, dtype)
        # Also for a group of one rank: the array may be passed to another group.
        return shared_memory(self.options).heap.empty(shape, dtype)

    def prepare(self, call: Call) -> Plan:
        composition = call.collective.composition
        if composition is None:
            if self._inter_host is not None:
                return self._inter_host.plan(call)
            if self.size == 1:
                return plan_alone(self, call)
            dataflow = definition_of(call.collective).dataflow
            if dataflow.scan is not None:
                return plan_scan(self._shm, call, dataflow.scan(call)) or super().prepare(call)
            if dataflow.spec is not None:
                spec = dataflow.spec(call)
                if isinstance(spec, ReductionSpec):
                    return plan_reduction(self._shm, call, spec)
                return plan_movement(self._shm, call, spec)
        elif composition.by_element and self._shared is not None:
            plan = plan_list_reduction(self._shared, call)
            if plan is not None:
                return plan
        return super().prepare(call)

    @classmethod
    def has_own(cls, native: str) -> bool:
        found = functions().get(native)
        if isinstance(found, Collective) and found.composition is None:
            describes = found.dataflow.spec is not None or found.dataflow.scan is not None
            return describes or super().has_own(native)
        return super().has_own(native)

    def choices(self) -> list[Choice]:
        return [] if self._shared is None else self._shared.tuning.choices()

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        if self._inter_host is not None:
            yield from self._inter_host.check_in(signature)
        elif self.size > 1:
            barrier = self._shm.barrier
            yield BarrierWait(barrier, barrier.signal(signature.fingerprint), signature)

    def meet(self, error_prefix: str, timeout_s: float, is_first: bool) -> None:
        if self.options.remote_ranks():
            self._make_inter_host()  # receives what another rank begins
        with naming_ended_rank(self.options):
            super().meet(error_prefix, timeout_s, is_first)

    def is_behind(self) -> bool:
        if self._inter_host is not None:
            return self._inter_host.is_behind()
        return self._shared is not None and self._shared.barrier.is_behind()

    def barrier(self, call: Call) -> Plan:
        return Barrier(self._shm.barrier, self, call)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        return (self._p2p or self._make_p2p()).send(array, dst, tag)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        return (self._p2p or self._make_p2p()).recv(array, src, tag)

    def probe(self, src: int | None, tag: int | None) -> Probe:
        return (self._p2p or self._make_p2p()).probe(src, tag)

    def own_messages(self) -> OwnMessages:
        return (self._p2p or self._make_p2p()).own

    def left_over(self) -> list[tuple[int, int]]:
        if self._p2p is None and self._shared is not None and self._shared.region.has_mail(self.rank):
            self._make_p2p()
        return [] if self._p2p is None else self._p2p.left_over()

    def disagreement(self) -> str:
        return "" if self._shared is None else self._shared.barrier.disagreement()

    def fast_send(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        return None if self._p2p is None else self._p2p.fast_send(dst, tag, dtype, shape)

    def fast_isend(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        return None if self._p2p is None else self._p2p.fast_send(dst, tag, dtype, shape, buffers=True)

    def fast_recv(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        return None if self._p2p is None else self._p2p.fast_recv(src, tag, dtype, shape)

    def wait(self, waitable: Waitable, error_prefix: str, deadline: Deadline | None = None) -> None:
        deadline = deadline or Deadline(self.options.timeout_s)
        if not spin(waitable):
            super().wait(waitable, error_prefix, deadline)

    def set_mismatch_handler(self, explain: Callable[[], DistBackendError]) -> None:
        if self._shared is not None:
            self._shared.barrier.explain = explain

    def has_local_mismatch(self) -> bool:
        return self._shared is not None and self._shared.barrier.has_mismatch()

    def check_local(self, signature: Signature) -> None:
        if self._shared is not None:
            self._shared.barrier.check_now(signature)

    def give_up(self, error: DistError) -> None:
        departure = gave_up(error)
        if self._shared is not None:
            self._shared.barrier.fail(error)
            self._shared.wait_for_writers()
        if self._inter_host is not None:
            self._inter_host.give_up(error)
        if self.size > 1:
            # Also with shared memory: a peer may still wait for this rank to publish a message channel.
            withdraw(self.options, self.rank, departure)
        if self._p2p is not None:
            self._p2p.fail(departure)

    def close(self) -> None:
        departure = self.options.peers.departure
        self._is_closed = True  # before it is looked for what another thread sets up, which looks at this after that
        if self._shared is not None:
            self._shared.barrier.leave(departure)
            self._shared.tuning.save()
            self._shared.region.seal()
            self._shared = None
        if self._p2p is not None:
            self._p2p.leave(departure)
            self._p2p = None
        if self._inter_host is not None:
            self._inter_host.close()
        # After closing the messages: a peer that reads this looks for no more of them. A rank that leaves the world
        # publishes that once for all groups, later.
        if self.size > 1 and (not self._is_connected or departure.exit is PeerExit.DESTROYED_GROUP):
            withdraw(self.options, self.rank, departure)

    @property
    def _shm(self) -> ShmGroup:
        if self._shared is None:
            assert self._is_connected, "connect comes before prepare"
            raise DistBackendError(_DESTROYED_MEANWHILE)
        return self._shared

    def _set_up(self) -> Iterator[Waitable]:
        self._shared = shared = ShmGroup(self, (yield from shared_segment(self)))
        if self._is_closed:
            shared.barrier.leave(self.options.peers.departure)
            raise DistBackendError(_DESTROYED_MEANWHILE)
        if self._p2p is not None:
            self._p2p.share(self._shared.region)
        yield from self._shared.wait_for_all()

    def _make_inter_host(self) -> InterHostCollectives:
        from meshdist.backends.gloo.hier.plans import InterHostCollectives

        remote = (self._p2p or self._make_p2p()).remote
        assert remote is not None
        with self._opening:  # as below
            if self._inter_host is None:
                self._inter_host = InterHostCollectives(self, remote, GlooBackend)
            return self._inter_host

    def _make_p2p(self) -> P2P:
        # The progress thread and the caller's thread may both be first.
        with self._opening:
            p2p = self._p2p
            if p2p is None:
                self._p2p = p2p = P2P(self)
                # In this order: the set-up, on another thread, comes before this, or finds the messages.
                if self._shared is not None:
                    p2p.share(self._shared.region)
        return p2p


class Barrier(OneStep):
    def step_copies(self) -> StepCopies:
        return StepCopies(None, 0, 0, [(), ()], [(), ()])

    def put(self, send: Buffers, phase: int) -> None:
        return

    def take(self, recv: Buffers, phase: int) -> None:
        return
