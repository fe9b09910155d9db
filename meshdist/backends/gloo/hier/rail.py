"""Rail: ranks of a group, one on each host, that carry out a collective over TCP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.hier.call_tracker import CallTracker
from meshdist.backends.gloo.tcp.collective_frames import ExpectedFrame
from meshdist.backends.gloo.tcp.frames import COLLECTIVE, pack
from meshdist.backends.gloo.tcp.outgoing import Outgoing
from meshdist.backends.gloo.tcp.waits import OutgoingWait, TcpWait, check_rank
from meshdist.runtime.call import Call
from meshdist.runtime.departure import LeftOut
from meshdist.runtime.waiting import Doorbell, Waitable

_EMPTY = memoryview(b"")


def bytes_of(array: Array) -> memoryview:
    return as_bytes(array).data


class Scratch:
    """Memory that the collectives of a group use, one after the other.

    Plans may keep what they get. If they had memory of their own, a program whose shapes never repeat would hold that
    of thousands. It grows to powers of two, so all that was handed out is less than twice the largest.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Array:
        """Return so many bytes, with what the last collective has left in them."""
        if self._memory.size < num_bytes:
            self._memory = np.empty(1 << (num_bytes - 1).bit_length(), np.uint8)
        return self._memory[:num_bytes]


class Rail:
    """One rank's view of a rail: `ranks` of the group, this one among them.

    The methods take places in `ranks`, not ranks. `place` is this rank's, `others` are the other places, beginning with
    the next.
    """

    def __init__(self, backend: Backend, tracker: CallTracker, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.place = self.ranks.index(backend.rank)
        self.others = [(self.place + step) % self.size for step in range(1, self.size)]
        self.transport = tracker.transport
        self._tracker = tracker
        self._receive_state = tracker.receive_state
        self._rank = backend.rank
        self._links = [
            self.transport.link(backend.options.ranks[rank]) if rank != backend.rank else None for rank in ranks
        ]
        self._unsent: list[tuple[int, Outgoing]] = []
        self.scratch = Scratch()  # where collectives receive

    def begin(self) -> None:
        self._unsent.clear()

    def send(self, place: int, data: memoryview, before: bytes | None = None) -> None:
        """Send a frame, unchanged until `flush`; with `before`, behind a short frame in the same write."""
        link = self._links[place]
        assert link is not None
        header = self._header(data)
        outgoing = Outgoing(header if before is None else self._header(before) + before + header, data)
        link.send(outgoing)
        if not outgoing.is_settled:
            self._unsent.append((place, outgoing))

    def _header(self, data: memoryview | bytes) -> bytes:
        return pack(COLLECTIVE, self._rank, self._receive_state.token, 0, len(data), self._tracker.word)

    def expect(self, place: int, into: memoryview) -> ExpectedFrame:
        link = self._links[place]
        assert link is not None
        with self.transport.lock:
            slot = self._receive_state.collectives.expect(self.ranks[place], into)
            link.resume()
        return slot

    def frames_wait(self, slots: Sequence[ExpectedFrame]) -> FramesWait:
        return FramesWait(self, slots)

    def flush(self) -> Iterator[Waitable]:
        for place, outgoing in self._unsent:
            if not outgoing.done:
                yield SendWait(self, place, outgoing)
        self._unsent.clear()

    def check(self, places: Sequence[int]) -> None:
        """Raise DistBackendError if a rank at these places is gone, or the calls differ."""
        self._tracker.check()
        for place in places:
            link = self._links[place]
            assert link is not None
            check_rank(self._receive_state, link, self.ranks[place], LeftOut.CALL)
        self._tracker.check_store()

    def awaited(self, places: Sequence[int]) -> list[int]:
        """Return the global ranks at places whose frames are missing; none if this rank will raise."""
        links = [] if self._receive_state.collectives.has_mismatch() else [self._links[place] for place in places]
        return [link.rank for link in links if link is not None]

    def describe(self, place: int) -> str:
        link = self._links[place]
        assert link is not None
        return link.describe(self._receive_state) + (f" ({link.connect_error})" if link.connect_error else "")


class FramesWait(TcpWait):
    def __init__(self, rail: Rail, slots: Sequence[ExpectedFrame]) -> None:
        super().__init__(rail.transport)
        self._rail = rail
        self._slots = slots

    def is_done(self) -> bool:
        for slot in self._slots:  # noqa: SIM110 - the hot path: a generator would take twice as long
            if not slot.done:
                return False
        return True

    def arm(self, bell: Doorbell) -> None:
        for slot in self._slots:
            slot.on_done = self.ring
        super().arm(bell)

    def disarm(self, bell: Doorbell) -> None:
        for slot in self._slots:
            slot.on_done = None
        super().disarm(bell)

    def check(self) -> None:
        self._rail.check(self._absent())

    def missing(self) -> str:
        return ", ".join(map(self._rail.describe, self._absent()))

    def awaits(self) -> list[int]:
        return self._rail.awaited(self._absent())

    def _absent(self) -> list[int]:
        return sorted({self._rail.ranks.index(slot.src) for slot in self._slots if not slot.done})


class SendWait(OutgoingWait):
    def __init__(self, rail: Rail, place: int, outgoing: Outgoing) -> None:
        super().__init__(rail.transport, outgoing)
        self._rail = rail
        self._place = place

    def check(self) -> None:
        self._rail.check([self._place])

    def missing(self) -> str:
        return f"{self._rail.describe(self._place)} to take what is sent"


class RailPlan(Plan):
    def __init__(self, rail: Rail, tracker: CallTracker, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        self.rail = rail
        self._tracker = tracker
        self._fingerprint = self.signature.fingerprint

    def begin(self) -> Rail:
        self._tracker.begin(self.signature, self._fingerprint)
        self.rail.begin()
        return self.rail


def dissemination_barrier(rail: Rail) -> Iterator[Waitable]:
    """Wait until all ranks have begun this collective: a dissemination barrier, which compares the calls.

    D. Hensgen, R. Finkel, U. Manber: Two algorithms for barrier synchronization, Int. J. Parallel Program. 17 (1988).
    """
    # After round k, every rank has heard, directly or not, of 2 ** (k + 1) ranks.
    distance = 1
    while distance < rail.size:
        slot = rail.expect((rail.place - distance) % rail.size, _EMPTY)
        rail.send((rail.place + distance) % rail.size, _EMPTY)
        yield rail.frames_wait([slot])
        distance *= 2
    yield from rail.flush()
