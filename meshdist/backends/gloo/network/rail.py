"""Rail: ranks of a group, one on each host, that carry out a collective together over the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshdist.arrays import Array, as_bytes
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.network.agreement import LEFT_OUT, Agreement
from meshdist.backends.gloo.wire.connection import Outgoing
from meshdist.backends.gloo.wire.frames import PART, pack
from meshdist.backends.gloo.wire.parts import Slot
from meshdist.backends.gloo.wire.waiting import OutgoingWait, WireWait, check_rank
from meshdist.call import Call
from meshdist.waiting import Doorbell, Waitable

_EMPTY = memoryview(b"")


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a plain array."""
    return as_bytes(array).data


class Rail:
    """One rank's place among those that carry out a collective together.

    Args:
        backend: The backend of the group.
        agreement: What its ranks are doing.
        ranks: The ranks of the group that take part; this one among them.

    Attributes:
        size: How many they are.
        place: This rank's place among them; all ranks in the arguments below are such.
        others: The other places, beginning with the next.
    """

    def __init__(self, backend: Backend, agreement: Agreement, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.place = self.ranks.index(backend.rank)
        self.others = [(self.place + step) % self.size for step in range(1, self.size)]
        self.wire = agreement.wire
        self._agreement = agreement
        self._bag = agreement.bag
        self._rank = backend.rank
        self._links = [self.wire.link(backend.options.ranks[rank]) if rank != backend.rank else None for rank in ranks]
        self._unsent: list[tuple[int, Outgoing]] = []
        self._scratch: Array | None = None

    def scratch(self, rows: int, num_bytes: int) -> Array:
        """Return memory for what is received and then added, in rows of bytes; the same for all collectives."""
        if self._scratch is None or self._scratch.shape != (rows, num_bytes):
            self._scratch = np.empty((rows, num_bytes), np.uint8)
        return self._scratch

    def begin(self) -> None:
        """Forget what an earlier collective, which failed, has left to be sent."""
        self._unsent.clear()

    def send(self, place: int, data: memoryview, before: bytes | None = None) -> None:
        """Send a part, which must not change until `flush`; right before it, in one go, one of few bytes if given."""
        link = self._links[place]
        assert link is not None
        header = self._header(data)
        outgoing = Outgoing(header if before is None else self._header(before) + before + header, data)
        link.send(outgoing)
        if not outgoing.done:
            self._unsent.append((place, outgoing))

    def _header(self, data: memoryview | bytes) -> bytes:
        return pack(PART, self._rank, self._bag.token, 0, len(data), self._agreement.word)

    def expect(self, place: int, into: memoryview) -> Slot:
        """Return the slot of the next part of a rank, which goes to `into`."""
        link = self._links[place]
        assert link is not None
        with self.wire.lock:
            slot = self._bag.parts.expect(self.ranks[place], into)
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
        self._agreement.check()
        for place in places:
            link = self._links[place]
            assert link is not None
            check_rank(self._bag, link, self.ranks[place], LEFT_OUT)
        self._agreement.inquire()

    def describe(self, place: int) -> str:
        """Return a rank for messages."""
        link = self._links[place]
        assert link is not None
        return link.describe(self._bag) + (f" ({link.trouble})" if link.trouble else "")


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


class Going(OutgoingWait):
    """A part on its way out."""

    def __init__(self, rail: Rail, place: int, outgoing: Outgoing) -> None:
        super().__init__(rail.wire, outgoing)
        self._rail = rail
        self._place = place

    def check(self) -> None:
        self._rail.check([self._place])

    def missing(self) -> str:
        return f"{self._rail.describe(self._place)} to take what is sent"


class RailPlan(Plan):
    """A plan that is carried out over a rail, which is that of the whole group."""

    def __init__(self, rail: Rail, agreement: Agreement, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        self.rail = rail
        self._agreement = agreement
        self._fingerprint = self.signature.fingerprint

    def begin(self) -> Rail:
        """Begin the call on the rail."""
        self._agreement.begin(self.signature, self._fingerprint)
        self.rail.begin()
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
