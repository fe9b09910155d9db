"""Data movement between hosts: every rank sends a part to every other, with the block that it has for it or with none.

So each hears of all, and knows that all make the same call. In large groups that is too much for little data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshdist.backends.base import Backend
from meshdist.backends.gloo.network.agreement import Agreement
from meshdist.backends.gloo.network.rail import Rail, RailPlan, bytes_of
from meshdist.backends.gloo.routes import Route
from meshdist.call import Buffers, Call
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
        own, kept = give[rail.place], take[rail.place]
        if own is not None and kept is not None:
            kept[...] = own
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


def _bytes(block: Array | None) -> memoryview:
    return _EMPTY if block is None else bytes_of(block)
