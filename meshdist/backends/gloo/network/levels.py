"""Levels: the ranks of a group on this host as a group of their own, and the rails between the hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshdist.backends.base import Backend, BackendOptions, Plan
from meshdist.backends.gloo.lockstep import LockstepPlan
from meshdist.backends.gloo.network.agreement import Agreement
from meshdist.backends.gloo.network.rail import Rail, meet
from meshdist.call import Buffers, Call, Signature
from meshdist.errors import DistError
from meshdist.store import PrefixStore
from meshdist.waiting import Waitable, Wrapped

if TYPE_CHECKING:
    from meshdist.backends.gloo.backend import GlooBackend
    from meshdist.collectives.definition import Collective


# About the second comes after a nap of a millisecond, the third after one of a tenth of a second.
_CHECKS_BEFORE_NOTE = 3


@dataclass(frozen=True)
class HostOptions(BackendOptions):
    """What the backend of a host's ranks is made from.

    Attributes:
        whole: What the whole group is; who goes away says so there.
        places: The ranks of the host, as they are numbered in the whole group.
    """

    whole: BackendOptions | None = None
    places: tuple[int, ...] = ()

    def gone(self, rank: int) -> str | None:
        """Return how a rank of the host went away without taking part in the group; None where it did not."""
        assert self.whole is not None
        return self.whole.gone(self.places[rank])

    def number(self, rank: int) -> int:
        """Return the number of a rank in messages."""
        return self.places[rank]

    @property
    def ranks_in_messages(self) -> tuple[int, ...]:
        """The global ranks of the whole group."""
        assert self.whole is not None
        return self.whole.ranks


def _options_here(options: BackendOptions, places: list[int]) -> HostOptions:
    values = {name: getattr(options, name) for name in BackendOptions.__dataclass_fields__}
    first = places[0]
    values.update(
        name=f"{options.name} from {first}",
        store=PrefixStore(f"host of {first}", options.store),
        rank=places.index(options.rank),
        ranks=tuple(options.ranks[place] for place in places),
    )
    return HostOptions(**values, whole=options, places=tuple(places))


class Levels:
    """The two levels of a group with several ranks on some hosts.

    Args:
        backend: The backend of the group.
        agreement: What its ranks are doing.
        hosts: The ranks by hosts.

    Attributes:
        here: The backend of the ranks on this host; None where this rank is alone.
        hosts: The ranks by hosts.
        mine: Those of this host.
        place: This rank's place among them.
        num_rails: As many as the smallest host has ranks. The ranks of equal place are on a rail, up to there.
        rail: That which this rank is on; None where there are too few.
    """

    def __init__(self, backend: Backend, agreement: Agreement, hosts: list[list[int]]) -> None:
        from meshdist.backends.gloo.backend import GlooBackend

        self.hosts = hosts
        self.mine = next(ranks for ranks in hosts if backend.rank in ranks)
        self.place = self.mine.index(backend.rank)
        self._options = backend.options
        self._noted = 0
        self.num_rails = min(map(len, hosts))
        self.agreement = agreement
        self.here: GlooBackend | None = None
        if len(self.mine) > 1:
            self.here = GlooBackend(_options_here(backend.options, self.mine))
        self.rail: Rail | None = None
        if self.place < self.num_rails:
            self.rail = Rail(backend, agreement, [ranks[self.place] for ranks in hosts])

    def connect(self) -> Iterator[Waitable]:
        """Set up what the ranks of this host share."""
        if self.here is not None:
            yield from self.crossing(self.here.connect())
            self.here.explain_by(self.agreement.disagreement)

    def meet(self, signature: Signature) -> Iterator[Waitable]:
        """Wait until all ranks of the group have begun this collective, and compare their calls."""
        self.agreement.begin(signature, signature.fingerprint)
        yield from self._meet_here(signature)
        if self.place == 0:
            assert self.rail is not None
            self.rail.begin()
            yield from self.crossing(meet(self.rail))
        yield from self._meet_here(signature)

    def _meet_here(self, signature: Signature) -> Iterator[Waitable]:
        if self.here is not None:
            yield from self.crossing(self.here.check_in(signature))

    def plan_here(self, outer: Signature, collective: Collective[..., Any], call: Call, **changes: Any) -> Plan | None:
        """Return the plan of a part of `call` that the ranks of this host carry out; None where this rank is alone.

        Args:
            outer: What all ranks of the group have in common.
            collective: What the part is.
            call: The call.
            changes: What of it is other: `send`, `recv`, `op` and `root`.
        """
        if self.here is None:
            return None
        values: dict[str, Any] = {"op": None, "root": None, "splits": None, "compares_shapes": False, **changes}
        inner = replace(call, collective=collective, rank=self.place, size=len(self.mine), **values)
        plan = self.here.prepare(inner)
        if isinstance(plan, LockstepPlan):
            plan.stand_for(outer)
        return plan

    def run_here(self, plan: Plan | None, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        """Carry out a plan of the ranks of this host."""
        if plan is not None:
            yield from self.crossing(plan.steps(send, recv))

    def crossing(self, waitables: Iterable[Waitable]) -> Iterator[Waitable]:
        """Yield waits of one level that end as well when the other one has failed."""
        for waitable in waitables:
            yield Crossing(waitable, self)

    def check(self) -> None:
        """Raise DistBackendError if a rank of either level has failed, or makes another call."""
        if self.here is not None and self.here.is_at_odds_here():
            # Those of the other hosts are to hear of it, and to be heard.
            raise self.agreement.disagreement()
        self.agreement.check()
        self.agreement.inquire()
        if self.here is not None:
            self.here.check_here(self.agreement.signature)

    def note(self) -> None:
        """Leave word in the store that this rank is in the current call."""
        word = self.agreement.word
        if self._noted != word:
            self._noted = word
            self._options.store.set(_note_key(self._options.rank), str(word))

    def absent(self) -> list[str]:
        """Return the ranks that have left no word that they are in the current call."""
        store, word = self._options.store, str(self.agreement.word).encode()
        keys = [_note_key(rank) for rank in range(len(self._options.ranks))]
        here = [store.check([key]) and store.get(key) == word for key in keys]
        describe = self._options.describe
        return [describe(rank) for rank, is_here in enumerate(here) if not is_here]

    def abort(self, reason: str) -> None:
        """Tell the ranks of this host that this one gives up."""
        if self.here is not None:
            self.here.abort(reason)

    def close(self) -> None:
        """Give back what the ranks of this host share."""
        if self.here is not None:
            self.here.close()


class Crossing(Wrapped):
    """A wait of one level that ends as well when the other one has failed.

    Who is waited for may itself wait for another rank, of its host or of another; so ranks that have waited for a while
    leave word that they are there.
    """

    def __init__(self, waitable: Waitable, levels: Levels) -> None:
        super().__init__(waitable)
        self._levels = levels
        self._num_checks = 0

    def check(self) -> None:
        self._levels.check()
        super().check()
        self._num_checks += 1
        if self._num_checks == _CHECKS_BEFORE_NOTE:
            with suppress(DistError):  # where the store is gone, others will say so
                self._levels.note()

    def missing(self) -> str:
        with suppress(DistError):
            self._levels.note()
            return ", ".join(self._levels.absent()) or super().missing()
        return super().missing()


def _note_key(rank: int) -> str:
    return f"in/{rank}"
