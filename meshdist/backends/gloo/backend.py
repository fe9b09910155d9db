"""GlooBackend: which plan carries out which call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Backend, BackendOptions, DefaultPlan, Express, Incoming, Plan
from meshdist.backends.gloo import cuts, routes
from meshdist.backends.gloo.host import Host, shared_segment
from meshdist.backends.gloo.lockstep import Arrival, OneStep
from meshdist.backends.gloo.messages import Mail
from meshdist.backends.gloo.movement import plan_movement
from meshdist.backends.gloo.places import ranks_elsewhere
from meshdist.backends.gloo.published import told_who_ended
from meshdist.backends.gloo.reduction import plan_reduction
from meshdist.backends.gloo.windows import shared_memory
from meshdist.backends.whereabouts import SetUpWait
from meshdist.backends.withdrawal import withdraw
from meshdist.call import Buffers, Call, Signature
from meshdist.deadline import Deadline
from meshdist.doorbells import SocketDoorbells
from meshdist.errors import DistBackendError
from meshdist.farewell import DESTROYED_GROUP, gave_up
from meshdist.waiting import Waitable, look_a_while

if TYPE_CHECKING:
    from meshdist.backends.gloo.network.plans import Network


class GlooBackend(Backend):
    """The CPU backend: shared memory between the ranks of a host, TCP between hosts.

    Memory is shared at the group's first collective, which all its ranks make; messages need only the two ranks.
    """

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        if not isinstance(options.bells, SocketDoorbells):
            raise ValueError("backend 'gloo' is for ranks that are processes; this rank is a thread of meshdist.run")
        self._shared: Host | None = None
        self._met = False
        self._opening = threading.Lock()
        self._mail: Mail | None = None
        self._network: Network | None = None

    def connect(self) -> Iterator[Waitable]:
        if not self._met and self.size > 1:
            with told_who_ended(self.options):
                if ranks_elsewhere(self.options):
                    self._network = (self._mail or self._make_mail()).network()
                    for waitable in self._network.connect():
                        yield SetUpWait(waitable, self.options)
                else:
                    for waitable in self._set_up():
                        yield SetUpWait(waitable, self.options)
            self._met = True

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if self.options.peers.num_ranks == 1:
            return super().empty(shape, dtype)
        # Also for a group of one rank: other groups can make use of it as well.
        return shared_memory(self.options).heap.empty(shape, dtype)

    def prepare(self, call: Call) -> Plan:
        # Alone there is nothing to share: the default algorithms have nobody to send to.
        if call.collective.staging is None:
            if self._network is not None:
                return self._network.plan(call)
            if self.size == 1:
                return DefaultPlan(self, call)
        return super().prepare(call)

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        if self._network is not None:
            yield from self._network.check_in(signature)
        elif self.size > 1:
            lockstep = self._host.lockstep
            yield Arrival(lockstep, lockstep.post(signature.fingerprint), signature)

    def barrier(self, call: Call) -> Plan:
        return Barrier(self._host.lockstep, self, call)

    def all_reduce(self, call: Call) -> Plan:
        return plan_reduction(self._host, call, cuts.all_reduce(call))

    def reduce(self, call: Call) -> Plan:
        return plan_reduction(self._host, call, cuts.reduce(call))

    def reduce_scatter(self, call: Call) -> Plan:
        return plan_reduction(self._host, call, cuts.reduce_scatter(call))

    reduce_scatter_tensor = reduce_scatter

    def broadcast(self, call: Call) -> Plan:
        return plan_movement(self._host, call, routes.broadcast(call))

    def all_gather(self, call: Call) -> Plan:
        return plan_movement(self._host, call, routes.all_gather(call))

    all_gather_into_tensor = all_gather

    def gather(self, call: Call) -> Plan:
        return plan_movement(self._host, call, routes.gather(call))

    def scatter(self, call: Call) -> Plan:
        return plan_movement(self._host, call, routes.scatter(call))

    def all_to_all(self, call: Call) -> Plan:
        return plan_movement(self._host, call, routes.all_to_all(call))

    def all_to_all_single(self, call: Call) -> Plan:
        return plan_movement(self._host, call, routes.all_to_all_single(call))

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        return (self._mail or self._make_mail()).send(array, dst, tag)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        return (self._mail or self._make_mail()).recv(array, src, tag)

    def express_to(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        return None if self._mail is None else self._mail.express_to(dst, tag, dtype, shape)

    def express_from(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        return None if self._mail is None else self._mail.express_from(src, tag, dtype, shape)

    def wait(self, waitable: Waitable, where: str, deadline: Deadline | None = None) -> None:
        deadline = deadline or Deadline(self.options.timeout_s)
        if not look_a_while(waitable):
            super().wait(waitable, where, deadline)

    def explain_by(self, explain: Callable[[], DistBackendError]) -> None:
        """Have `explain` find out what the calls are where those of ranks that memory is shared with disagree."""
        if self._shared is not None:
            self._shared.lockstep.explain = explain

    def is_at_odds_here(self) -> bool:
        """Return whether a rank that memory is shared with makes another call."""
        return self._shared is not None and self._shared.lockstep.is_at_odds()

    def check_here(self, signature: Signature) -> None:
        """Raise DistBackendError if a rank that memory is shared with makes another call, has given up, or is dead."""
        if self._shared is not None:
            self._shared.lockstep.check_now(signature)

    def abort(self, reason: str) -> None:
        if self._shared is not None:
            self._shared.lockstep.fail(reason)
            self._shared.settle()
        if self._network is not None:
            self._network.abort(reason)
        if self.size > 1:
            # Also where memory is shared: a peer may wait for a message channel, which is found through the store.
            withdraw(self.options, self.rank, gave_up(reason))
        if self._mail is not None:
            self._mail.fail(reason)

    def close(self) -> None:
        farewell = self.options.peers.farewell
        if self._shared is not None:
            self._shared.lockstep.leave(farewell)
            self._shared.arena.seal()
            self._shared = None
        if self._mail is not None:
            self._mail.leave(farewell)
            self._mail = None
        if self._network is not None:
            self._network.close()
        # After the mail: whoever finds this stops to look for a message. Who leaves the world says so to all groups in
        # one place, but may take its time until then.
        if self.size > 1 and (not self._met or farewell == DESTROYED_GROUP):
            withdraw(self.options, self.rank, farewell)

    @property
    def _host(self) -> Host:
        assert self._shared is not None, "connect comes before prepare"
        return self._shared

    def _set_up(self) -> Iterator[Waitable]:
        self._shared = Host(self, (yield from shared_segment(self)))
        yield from self._shared.meet()

    def _make_mail(self) -> Mail:
        # A thread that carries out an async collective may be the first to need it, just as the caller's is.
        with self._opening:
            mail = self._mail
            if mail is None:
                self._mail = mail = Mail(self)
        return mail


class Barrier(OneStep):
    """Nothing but the meeting."""

    def put(self, send: Buffers, use: int) -> None:
        return

    def take(self, recv: Buffers, use: int) -> None:
        return
