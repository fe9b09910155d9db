"""Hierarchy: the ranks of a group on this host as a group of their own, and the rails between the hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.hier.call_tracker import CallTracker
from meshdist.backends.gloo.hier.rail import Rail, Scratch, dissemination_barrier
from meshdist.backends.gloo.shm.barrier_plans import BarrierPlan
from meshdist.collectives.definition import Collective
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.call import Buffers, Call, ShapeRule, Signature
from meshdist.runtime.departure import Departure
from meshdist.runtime.waiting import Waitable, Wrapped
from meshdist.store import PrefixStore

# About the second check follows a sleep of a millisecond, the third one of a tenth of a second.
_CHECKS_BEFORE_PUBLISHING = 3


class HostBackend(Protocol):
    """The backend of the ranks of one host. `has_local_mismatch` and `check_local` see only these ranks."""

    def connect(self) -> Iterator[Waitable]: ...

    def prepare(self, call: Call) -> Plan: ...

    def check_in(self, signature: Signature) -> Iterator[Waitable]: ...

    def is_behind(self) -> bool: ...

    def set_mismatch_handler(self, explain: Callable[[], DistBackendError]) -> None:
        """Set the function that reports a mismatch: it collects the calls of the whole group."""

    def has_local_mismatch(self) -> bool:
        """Return whether one of the ranks makes another call."""

    def check_local(self, signature: Signature) -> None:
        """Raise DistBackendError if one of the ranks makes another call, has given up, or is dead."""

    def give_up(self, error: DistError) -> None: ...

    def close(self) -> None: ...


HostBackendFactory: TypeAlias = "Callable[[BackendOptions], HostBackend]"


class HostOptions(BackendOptions):
    """Options of the backend of a host's ranks: those of the `whole` group, and the ranks' `places` in it."""

    def __init__(self, whole: BackendOptions, places: list[int]) -> None:
        vars(self).update(vars(whole))
        self.whole, self.places = whole, tuple(places)
        self.name = f"{whole.name} from {places[0]}"
        self.store = PrefixStore(f"host of {places[0]}", whole.store)
        self.rank = places.index(whole.rank)
        self.ranks = tuple(whole.ranks[place] for place in places)

    def gone(self, rank: int) -> Departure | None:
        return self.whole.gone(self.places[rank])

    def number(self, rank: int) -> int:
        return self.places[rank]

    @property
    def ranks_in_messages(self) -> tuple[int, ...]:
        return self.whole.ranks


class Hierarchy:
    """The two levels of a group with several ranks on some hosts."""

    def __init__(
        self, backend: Backend, tracker: CallTracker, hosts: list[list[int]], make_backend: HostBackendFactory
    ) -> None:
        self.hosts = hosts
        self.mine = next(ranks for ranks in hosts if backend.rank in ranks)  # the ranks of this host
        self.place = self.mine.index(backend.rank)  # this rank's place among them
        self._options = backend.options
        self._published_word = 0
        # The size of the smallest host; ranks of equal place below it are on a rail.
        self.num_rails = min(map(len, hosts))
        self.tracker = tracker
        self.scratch = Scratch()
        self.local: HostBackend | None = None  # the backend of the ranks on this host; None if there are no others
        if len(self.mine) > 1:
            self.local = make_backend(HostOptions(backend.options, self.mine))
        self.rail: Rail | None = None  # the rail of this rank; None if it is on none
        if self.place < self.num_rails:
            self.rail = Rail(backend, tracker, [ranks[self.place] for ranks in hosts])

    def connect(self) -> Iterator[Waitable]:
        if self.local is not None:
            yield from self.guarded(self.local.connect())
            self.local.set_mismatch_handler(self.tracker.mismatch_error)

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        self.tracker.begin(signature, signature.fingerprint)
        yield from self._check_in_local(signature)
        if self.place == 0:
            assert self.rail is not None
            self.rail.begin()
            yield from self.guarded(dissemination_barrier(self.rail))
        yield from self._check_in_local(signature)

    def _check_in_local(self, signature: Signature) -> Iterator[Waitable]:
        if self.local is not None:
            yield from self.guarded(self.local.check_in(signature))

    def plan_local(self, outer: Signature, collective: Collective[..., Any], call: Call, **changes: Any) -> Plan | None:
        """Return the plan of this host's part of the group's `call`; None if this rank is alone on it.

        The part is a call of `collective`, with other values of the fields in `changes`; `outer`, the signature of the
        group's call, is signalled.
        """
        if self.local is None:
            return None
        values: dict[str, Any] = {
            "op": None,
            "root": None,
            "splits": None,
            "shape_rule": ShapeRule.ANY_SHAPE,
            **changes,
        }
        inner = call._replace(collective=collective, rank=self.place, size=len(self.mine), **values)
        plan = self.local.prepare(inner)
        if isinstance(plan, BarrierPlan):
            plan.adopt_signature(outer)
        return plan

    def run_local(self, plan: Plan | None, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        if plan is not None:
            yield from self.guarded(plan.steps(send, recv))

    def guarded(self, waitables: Iterable[Waitable]) -> Iterator[Waitable]:
        """Yield waits of one level that also fail when the other level has failed."""
        for waitable in waitables:
            yield HierarchicalWait(waitable, self)

    def check(self) -> None:
        """Raise DistBackendError if a rank of either level has failed, or makes another call."""
        if self.local is not None and self.local.has_local_mismatch():
            # Include the ranks of the other hosts, which do not see this host's flags.
            raise self.tracker.mismatch_error()
        self.tracker.check()
        self.tracker.check_store()
        if self.local is not None:
            self.local.check_local(self.tracker.signature)

    def publish_arrival(self) -> None:
        word = self.tracker.word
        if self._published_word != word:
            self._published_word = word
            self._options.store.set(_arrival_key(self._options.rank), str(word))

    def absent(self) -> list[str]:
        store, word = self._options.store, str(self.tracker.word).encode()
        keys = [_arrival_key(rank) for rank in range(len(self._options.ranks))]
        here = [store.check([key]) and store.get(key) == word for key in keys]
        describe = self._options.describe
        return [describe(rank) for rank, is_here in enumerate(here) if not is_here]

    def give_up(self, error: DistError) -> None:
        if self.local is not None:
            self.local.give_up(error)

    def close(self) -> None:
        if self.local is not None:
            self.local.close()


class HierarchicalWait(Wrapped):
    """A wait of one level that also fails when the other level has failed.

    The awaited rank may itself wait for a rank of its own or another host, so ranks that have waited for a while
    publish that they are in the call; the error names the others.
    """

    def __init__(self, waitable: Waitable, hierarchy: Hierarchy) -> None:
        super().__init__(waitable)
        self._hierarchy = hierarchy
        self._num_checks = 0

    def check(self) -> None:
        self._hierarchy.check()
        super().check()
        self._num_checks += 1
        if self._num_checks == _CHECKS_BEFORE_PUBLISHING:
            with suppress(DistError):  # other checks report the loss of the store
                self._hierarchy.publish_arrival()

    def missing(self) -> str:
        with suppress(DistError):
            self._hierarchy.publish_arrival()
            return ", ".join(self._hierarchy.absent()) or super().missing()
        return super().missing()


def _arrival_key(rank: int) -> str:
    return f"in/{rank}"
