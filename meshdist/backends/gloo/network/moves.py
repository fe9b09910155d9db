"""Data movement between hosts: every rank sends a part to every other, with the block that it has for it or with none.

So each hears of all, and knows that all make the same call. In large groups that is too much for little data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshdist.backends.base import Backend
from meshdist.backends.gloo.network.agreement import Agreement
from meshdist.backends.gloo.network.rail import Rail, RailPlan, bytes_of
from meshdist.backends.gloo.routes import Route
from meshdist.call import Buffers, Call
from meshdist.debug.mismatch import compare_splits
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.arrays import Array

_EMPTY = memoryview(b"")


class FullExchange(RailPlan):
    """Each gives each what the route says, all at once.

    Args:
        rail: Of the whole group.
        backend: The group's.
        call: The call.
        route: What it moves.
        taken_by: Whether a rank takes what this one gives it.
    """

    def __init__(
        self,
        rail: Rail,
        agreement: Agreement,
        backend: Backend,
        call: Call,
        route: Route,
        taken_by: Callable[[int], bool],
    ) -> None:
        super().__init__(rail, agreement, backend, call)
        self._route = route
        self._takers = [taken_by(rank) for rank in range(rail.size)]

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        give, take = self._route.give(send), self._route.take(recv)
        rail = self.begin()
        slots = [rail.expect(peer, _bytes(take[peer])) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, _bytes(give[peer]) if self._takers[peer] else _EMPTY)
        _keep_own(give[rail.place], take[rail.place])
        yield rail.coming(slots)
        yield from rail.flush()


class AgreedExchange(RailPlan):
    """An exchange whose sizes only the ranks together know: each tells all what it gives and expects.

    What is given follows at once, and finds its place when all sizes are known to agree; all raise if two do not.
    """

    def __init__(self, rail: Rail, agreement: Agreement, backend: Backend, call: Call, route: Route) -> None:
        super().__init__(rail, agreement, backend, call)
        self._route = route
        # What each rank gives each, and expects of each. That of the others is written by every call.
        self._sizes = np.empty((rail.size, 2, rail.size), np.int64)
        blocks = route.give(call.send), route.take(call.recv)
        self._sizes[rail.place] = call.splits or [[_size(block) for block in side] for side in blocks]
        self._rows = [bytes_of(row) for row in self._sizes]
        self._own = self._sizes[rail.place].tobytes()
        # What it was when it was last found to agree.
        self._agreed = b""

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        give, take = self._route.give(send), self._route.take(recv)
        rail, rows = self.begin(), self._rows
        slots = [rail.expect(peer, rows[peer]) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, _bytes(give[peer]), before=self._own)
        yield rail.coming(slots)
        self._compare()
        slots = [rail.expect(peer, _bytes(take[peer])) for peer in rail.others]
        _keep_own(give[rail.place], take[rail.place])
        yield rail.coming(slots)
        yield from rail.flush()

    def _compare(self) -> None:
        sizes = self._sizes
        said = sizes.tobytes()
        if said != self._agreed:
            compare_splits(sizes[:, 0], sizes[:, 1], self._route.unit, self.backend.options.ranks)
            self._agreed = said


class FullMeeting(RailPlan):
    """Nothing but the meeting."""

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        rail = self.begin()
        slots = [rail.expect(peer, _EMPTY) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, _EMPTY)
        yield rail.coming(slots)
        yield from rail.flush()


def _keep_own(own: Array | None, kept: Array | None) -> None:
    if own is not None and kept is not None:
        kept[...] = own


def _size(block: Array | None) -> int:
    return 0 if block is None else block.size


def _bytes(block: Array | None) -> memoryview:
    return _EMPTY if block is None else bytes_of(block)
