"""Rail: ranks of a group, one on each host, that carry out a collective together over the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshdist.arrays import Array
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.outbox import as_bytes
from meshdist.backends.gloo.wire.bag import Bag
from meshdist.backends.gloo.wire.connection import Outgoing
from meshdist.backends.gloo.wire.frames import CALLED, PART, pack, pack_text
from meshdist.backends.gloo.wire.parts import NUMBER, Slot
from meshdist.backends.gloo.wire.waiting import Inquiry, WireWait, check_all, check_rank
from meshdist.call import Call, Signature, call_site
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.gloo.wire.wire import Wire

# How long a rank whose call disagrees waits for the others to say what theirs is.
_EXPLAIN_S = 0.8
_PAUSE_S = 0.002
_LEFT_OUT = "making this call"
_EMPTY = memoryview(b"")


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a plain array."""
    return as_bytes(array).data


class Rail:
    """One rank's place among those that carry out a collective together.

    Args:
        backend: The backend of the group.
        wire: The wire.
        bag: What comes for the group.
        ranks: The ranks of the group that take part; this one among them.

    Attributes:
        size: How many they are.
        place: This rank's place among them; all ranks in the arguments below are such.
        others: The other places, beginning with the next.
    """

    def __init__(self, backend: Backend, wire: Wire, bag: Bag, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.place = self.ranks.index(backend.rank)
        self.others = [(self.place + step) % self.size for step in range(1, self.size)]
        self.wire = wire
        self.bag = bag
        self.options = backend.options
        self._rank = backend.rank
        self._parts = bag.parts
        self._token = bag.token
        self._links = [wire.link(self.options.ranks[rank]) if rank != backend.rank else None for rank in self.ranks]
        self._inquiry = Inquiry(backend.options, _LEFT_OUT)
        self._signature = Signature("nothing")
        self._word = 0
        self._unsent: list[tuple[int, Outgoing]] = []

    def begin(self, signature: Signature, fingerprint: int) -> None:
        """Begin a collective."""
        self._signature = signature
        self._unsent.clear()
        with self.wire.lock:
            self._word = self._parts.begin(fingerprint)

    def send(self, place: int, data: memoryview) -> None:
        """Send a part; it must not change until `flush`."""
        link = self._links[place]
        assert link is not None
        outgoing = Outgoing(pack(PART, self._rank, self._token, 0, len(data), self._word), data)
        link.send(outgoing)
        if not outgoing.done:
            self._unsent.append((place, outgoing))

    def expect(self, place: int, into: memoryview) -> Slot:
        """Return the slot of the next part of a rank, which goes to `into`."""
        link = self._links[place]
        assert link is not None
        with self.wire.lock:
            slot = self._parts.expect(self.ranks[place], into)
            link.go_on()
        return slot

    def coming(self, slots: Sequence[Slot]) -> Coming:
        """Return the wait for parts that are expected."""
        return Coming(self, slots)

    def flush(self) -> Iterator[Waitable]:
        """Wait until the system has what was sent."""
        for place, outgoing in self._unsent:
            if not outgoing.done:
                yield Going(self, place, outgoing)
        self._unsent.clear()

    def check(self, places: Sequence[int]) -> None:
        """Raise DistBackendError if nothing can come of these ranks, or the calls disagree."""
        # What has been said may not be read yet.
        self.wire.drive()
        if self._parts.is_at_odds():
            raise self._disagree()
        check_all(self.options, self.bag, self.wire)
        for place in places:
            link = self._links[place]
            assert link is not None
            check_rank(self.bag, link, self.ranks[place], _LEFT_OUT)
        # Of all: the last word of one that has sent all that is waited for may be behind what nobody waits for yet.
        self._inquiry.check([self.ranks[place] for place in self.others])

    def describe(self, place: int) -> str:
        """Return a rank for messages."""
        link = self._links[place]
        assert link is not None
        return f"{link.description} ({link.trouble})" if link.trouble else link.description

    def _disagree(self) -> DistBackendError:
        mine = f"{self._signature.text} at {call_site()}"
        header, text = pack_text(CALLED, self._rank, self._token, mine, self._word)
        everybody = [rank for rank in range(len(self.options.ranks)) if rank != self._rank]
        for rank in everybody:
            self.wire.link(self.options.ranks[rank]).say(header, text)
        calls, end_s = self._parts.calls, time.monotonic() + _EXPLAIN_S
        while time.monotonic() < end_s and not all(rank in calls for rank in everybody):
            time.sleep(_PAUSE_S)
            self.wire.drive()
        number = self._word & NUMBER
        theirs = {rank: words for rank, (word, words) in calls.items() if word & NUMBER == number}
        return DistBackendError(disagreement({**theirs, self._rank: mine}))


class Coming(WireWait):
    """Parts that are expected."""

    def __init__(self, rail: Rail, slots: Sequence[Slot]) -> None:
        super().__init__(rail.wire)
        self._rail = rail
        self._slots = slots

    def is_done(self) -> bool:
        """Return True once all are there."""
        for slot in self._slots:  # noqa: SIM110 - the hot path: a generator would take twice as long
            if not slot.done:
                return False
        return True

    def arm(self, bell: Doorbell) -> None:
        for slot in self._slots:
            slot.then = self.ring
        super().arm(bell)

    def check(self) -> None:
        self._rail.check(self._absent())

    def missing(self) -> str:
        return ", ".join(map(self._rail.describe, self._absent()))

    def _absent(self) -> list[int]:
        return sorted({self._rail.ranks.index(slot.src) for slot in self._slots if not slot.done})


class Going(WireWait):
    """A part on its way out."""

    def __init__(self, rail: Rail, place: int, outgoing: Outgoing) -> None:
        super().__init__(rail.wire)
        self._rail = rail
        self._place = place
        self._outgoing = outgoing

    def is_done(self) -> bool:
        """Return True once the system has it."""
        return self._outgoing.done

    def arm(self, bell: Doorbell) -> None:
        self._outgoing.then = self.ring
        super().arm(bell)

    def check(self) -> None:
        self._rail.check([self._place])

    def missing(self) -> str:
        return f"{self._rail.describe(self._place)} to take what is sent"


class RailPlan(Plan):
    """A plan that is carried out over a rail, which is that of the whole group."""

    def __init__(self, rail: Rail, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        self.rail = rail
        self.fingerprint = self.signature.fingerprint

    def begin(self) -> Rail:
        """Begin the call on the rail."""
        self.rail.begin(self.signature, self.fingerprint)
        return self.rail


def meet(rail: Rail) -> Iterator[Waitable]:
    """Wait until all have begun this collective; who passes knows that all make the same call.

    D. Hensgen, R. Finkel, U. Manber: Two algorithms for barrier synchronization, Int. J. Parallel Program. 17 (1988).
    """
    # After round k, every rank has heard, directly or not, of 2 ** (k + 1) ranks.
    distance = 1
    while distance < rail.size:
        slot = rail.expect((rail.place - distance) % rail.size, _EMPTY)
        rail.send((rail.place + distance) % rail.size, _EMPTY)
        yield rail.coming([slot])
        distance *= 2
    yield from rail.flush()
