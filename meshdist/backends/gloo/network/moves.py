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
        self._splits = call.splits

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        give, take = self._route.give(send), self._route.take(recv)
        rail = self.begin()
        sizes = np.empty((rail.size, 2, rail.size), np.int64)
        sizes[rail.place] = self._splits or [[_size(block) for block in blocks] for blocks in (give, take)]
        slots = [rail.expect(peer, bytes_of(sizes[peer])) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, bytes_of(sizes[rail.place]))
            rail.send(peer, _bytes(give[peer]))
        yield rail.coming(slots)
        compare_splits(sizes[:, 0], sizes[:, 1], self._route.unit, self.backend.options.ranks)
        slots = [rail.expect(peer, _bytes(take[peer])) for peer in rail.others]
        _keep_own(give[rail.place], take[rail.place])
        yield rail.coming(slots)
        yield from rail.flush()


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
