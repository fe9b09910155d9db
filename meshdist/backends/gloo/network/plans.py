"""Which plan carries out which call of a group with ranks on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshdist.backends.base import Backend, DefaultPlan, Plan
from meshdist.backends.gloo import cuts, routes
from meshdist.backends.gloo.cuts import Cut
from meshdist.backends.gloo.network.agreement import Agreement, Concluded
from meshdist.backends.gloo.network.doubling import plan_rounds
from meshdist.backends.gloo.network.exchanging import LevelExchange
from meshdist.backends.gloo.network.knowing import plan_knowing
from meshdist.backends.gloo.network.levels import Levels
from meshdist.backends.gloo.network.moves import AgreedExchange, FullExchange, FullMeeting
from meshdist.backends.gloo.network.rail import Rail, meet
from meshdist.backends.gloo.network.reductions import SegmentReduce, WholeReduce
from meshdist.backends.gloo.network.spreading import SPREAD_BYTES, SpreadBroadcast
from meshdist.backends.gloo.network.two_levels import TwoLevelReduce
from meshdist.backends.gloo.places import hosts_of
from meshdist.backends.gloo.routes import Route
from meshdist.call import Call, Signature, num_bytes
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.gloo.remote_mail import RemoteMail

# Up to so many ranks, all of them send to all at once; more take turns in trees and rings.
MOST_AT_ONCE = 8
# Up to so many ranks, all come to know what each gives each; of more, that is too much.
MOST_EXCHANGING = 32
# Up to so many hosts, their ranks on a rail reduce a share each; more would have too many small parts to send.
MOST_ON_RAILS = 32
# Up to here, over all ranks, every rank is sent all data and reduces for itself. Measured on 2 ranks.
WHOLE_BYTES = 64 << 10


class Network:
    """The collectives of a group with ranks on several hosts.

    Args:
        backend: The backend of the group.
        mail: Its mail with ranks of other hosts.
    """

    def __init__(self, backend: Backend, mail: RemoteMail) -> None:
        self._backend = backend
        hosts = hosts_of(backend.options)
        one_each = len(hosts) == backend.size
        self._agreement = Agreement(backend, mail.wire, mail.bag)
        self._rail = Rail(backend, self._agreement, range(backend.size)) if one_each else None
        self._levels = None if one_each else Levels(backend, self._agreement, hosts)

    def connect(self) -> Iterator[Waitable]:
        """Set up what the ranks of this host share."""
        return iter(()) if self._levels is None else self._levels.connect()

    def abort(self, reason: str) -> None:
        """Tell the ranks of this host that this one gives up; those of others are told by mail."""
        self._agreement.leave_word()
        if self._levels is not None:
            self._levels.abort(reason)

    def close(self) -> None:
        """Give back what the ranks of this host share."""
        self._agreement.leave_word()
        if self._levels is not None:
            self._levels.close()

    def plan(self, call: Call) -> Plan:
        """Return the plan of a call."""
        backend = self._backend
        return Concluded(self._native(call) or DefaultPlan(backend, call), backend, call, self._agreement)

    def _native(self, call: Call) -> Plan | None:
        """Return the plan of a call; None where the default algorithm is to carry it out."""
        if self._levels is not None:
            return self._of_levels(self._levels, call)
        rail = self._rail
        assert rail is not None
        name = call.collective.native
        if rail.size > MOST_AT_ONCE:
            return plan_rounds(rail, self._agreement, self._backend, call) if name == "all_reduce" else None
        if name == "barrier":
            return FullMeeting(rail, self._agreement, self._backend, call)
        if name in _CUTS:
            return self._reduction(rail, call, _CUTS[name](call))
        if name == "all_to_all" or call.splits is not None:
            return AgreedExchange(rail, self._agreement, self._backend, call, _ROUTES[name](call))
        if name == "broadcast" and rail.size > 2 and num_bytes(call.recv) >= SPREAD_BYTES:
            return SpreadBroadcast(rail, self._agreement, self._backend, call)
        if name in _ROUTES:
            root = call.root if name == "gather" else None
            return FullExchange(
                rail, self._agreement, self._backend, call, _ROUTES[name](call), lambda rank: root in (None, rank)
            )
        return None

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        """Begin a collective that runs over send and recv: compare the ranks' calls."""
        if self._levels is not None:
            return self._levels.meet(signature)
        rail = self._rail
        assert rail is not None
        self._agreement.begin(signature, signature.fingerprint)
        rail.begin()
        return meet(rail)

    def _of_levels(self, levels: Levels, call: Call) -> Plan | None:
        name = call.collective.native
        if len(levels.hosts) > MOST_ON_RAILS:
            return None
        if len(levels.hosts) <= MOST_AT_ONCE:
            plan = plan_knowing(levels, self._backend, call)
            if plan is not None:
                return plan
            if (name == "all_to_all" or call.splits is not None) and call.size <= MOST_EXCHANGING:
                return LevelExchange(levels, self._backend, call, _ROUTES[name](call))
        return TwoLevelReduce(levels, self._backend, call) if name == "all_reduce" else None

    def _reduction(self, rail: Rail, call: Call, cut: Cut) -> Plan:
        if not cut.keeps and cut.put_bytes * (rail.size - 1) <= WHOLE_BYTES:
            return WholeReduce(rail, self._agreement, self._backend, call, wanted=call.root in (None, call.rank))
        return SegmentReduce(rail, self._agreement, self._backend, call, cut)


_CUTS: dict[str, Callable[[Call], Cut]] = {
    "all_reduce": cuts.all_reduce,
    "reduce": cuts.reduce,
    "reduce_scatter": cuts.reduce_scatter,
    "reduce_scatter_tensor": cuts.reduce_scatter,
}
_ROUTES: dict[str, Callable[[Call], Route]] = {
    "broadcast": routes.broadcast,
    "all_gather": routes.all_gather,
    "all_gather_into_tensor": routes.all_gather,
    "gather": routes.gather,
    "scatter": routes.scatter,
    "all_to_all": routes.all_to_all,
    "all_to_all_single": routes.all_to_all_single,
}
