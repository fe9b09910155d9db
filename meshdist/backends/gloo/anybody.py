"""Anybody: all other ranks of the group, as those that a message is taken of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdist.backends.base import Incoming
from meshdist.backends.gloo.published import Senders, fate
from meshdist.backends.gloo.receipts import LEFT_OUT, Expected, Receipt
from meshdist.farewell import ORDERLY, any_of, nobody_left, peer_gone

if TYPE_CHECKING:
    from meshdist.backends.base import Backend
    from meshdist.backends.gloo.inbox import Inbox
    from meshdist.backends.gloo.wire.inbox import WireInbox

# The store is asked for every rank that has sent nothing: not more often than this.
_PAUSE_S = 0.05


class Anybody:
    """Where a message comes from that may come from any rank.

    Args:
        backend: The backend that it is for.
        inboxes: The inboxes there are, by rank.
        make: Returns the inbox of a rank, made where there is none.
        expected: What this rank expects from all.

    Attributes:
        description: What messages call it.
    """

    looking_s = Incoming.looking_s

    def __init__(
        self, backend: Backend, inboxes: dict[int, Inbox | WireInbox], make: Callable[[int], object], expected: Expected
    ) -> None:
        self._options = backend.options
        self._inboxes = inboxes
        self._make = make
        self._expected = expected
        self._senders = Senders(backend.options, backend.rank)
        self._others = others = [rank for rank in range(backend.size) if rank != backend.rank]
        self.description = any_of(others, backend.options.describe)
        backend.options.peers.cards(backend.options.ranks)  # at once, for the look whether their processes live
        self._gone: dict[int, str] = {}
        self._next_s = 0.0
        self._turn = 0

    def move(self, receipt: Receipt) -> None:
        """Read on until `receipt` has its message, or there is nothing more to read."""
        for src in self._senders.find():
            self._make(src)
        for inbox in self.inboxes():
            inbox.move(receipt)
            if receipt.done:
                # The next turn begins with another one.
                with self._expected.lock:
                    self._inboxes[receipt.source] = self._inboxes.pop(receipt.source)
                return

    def check(self) -> None:
        """Raise DistBackendError if one of the others gave up or died, who may have been the one, or all have left."""
        unheard = []
        for rank in self._others:
            inbox = self._inboxes.get(rank)
            if inbox is None or not inbox.is_heard:
                unheard.append(rank)
                continue
            farewell = inbox.farewell()
            if farewell is None:
                inbox.check()
            else:
                self._gone[rank] = farewell
        if time.monotonic() >= self._next_s:
            self._look_for(unheard)
            self._next_s = time.monotonic() + _PAUSE_S
        if len(self._gone) == len(self._others):
            self.look_again()  # the last word of one of them may not have been found
            raise nobody_left({self._options.describe(rank): self._gone[rank] for rank in self._others})

    def look_again(self) -> None:
        """Have the next `move` ask the store for new channels, however short ago that was done."""
        self._senders.look_again()
        for inbox in self.inboxes():
            inbox.look_again()

    def inboxes(self) -> list[Inbox | WireInbox]:
        """Return the inboxes there are."""
        return list(self._inboxes.values())

    def tags_instead(self, tag: int) -> str:
        """Return what other tags messages have that nobody asked for, for the end of a message."""
        return self._expected.tags_instead(tag, None)

    def _look_for(self, unheard: list[int]) -> None:
        # The store is asked for those whose process has ended, and for the others, beginning with another one each
        # time, until one is there.
        options = self._options
        self._turn += 1
        first = self._turn % max(1, len(unheard))
        is_anybody_there = False
        for rank in (*unheard[first:], *unheard[:first]):
            if rank not in self._gone and (not is_anybody_there or options.peers.ended(options.ranks[rank])):
                what = fate(options, rank)
                if what is None:
                    is_anybody_there = True
                elif what in ORDERLY:
                    self._gone[rank] = what
                else:
                    raise peer_gone(options.describe(rank), what, LEFT_OUT)
