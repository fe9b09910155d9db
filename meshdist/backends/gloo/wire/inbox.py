"""Inbox: the messages of a group from one rank of another host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.backends.base import Express
from meshdist.backends.gloo.receipts import LEFT_OUT, Parcel, Receipt
from meshdist.backends.gloo.wire.bag import Bag, LongParcel, hand_over
from meshdist.backends.gloo.wire.express import express_from
from meshdist.backends.gloo.wire.frames import LEFT
from meshdist.backends.gloo.wire.waiting import LOOKING_S, Inquiry, check_all, check_rank, unwatch, watch
from meshdist.waiting import Doorbell

if TYPE_CHECKING:
    from meshdist.backends.base import Backend
    from meshdist.backends.gloo.inbox import Inbox
    from meshdist.backends.gloo.wire.wire import Wire


class WireInbox:
    """The messages from one rank; an `Origin`, and one of those that any rank's are taken of."""

    def __init__(self, backend: Backend, src: int, wire: Wire, bag: Bag) -> None:
        self.link = wire.link(backend.options.ranks[src])
        self.description = self.link.describe(bag)
        self.looking_s = LOOKING_S
        self._inquiry = Inquiry(backend.options, LEFT_OUT)
        self.src = src
        self._wire = wire
        self.bag = bag

    @property
    def is_heard(self) -> bool:
        """Whether the rank has been heard of."""
        return self.link.is_connected or self.src in self.bag.said

    def express(self, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes) -> Express | None:
        """Return a short way for messages of a kind, None where there is none."""
        return express_from(self, tag, dtype, shape, dtype_name)

    def move(self, receipt: Receipt) -> None:
        """Take what has come, for all."""
        self._wire.drive()

    def check(self) -> None:
        """Raise DistBackendError if nothing more can come."""
        check_rank(self.bag, self.link, self.src, LEFT_OUT)
        self._inquiry.check(self.src, self.link)

    def look_again(self) -> None:
        """Have nothing to look for: what comes shows by itself."""

    def inboxes(self) -> list[WireInbox]:
        """Return this inbox, as those that a receipt of one rank waits for."""
        return [self]

    def tags_instead(self, tag: int) -> str:
        """Return what other tags messages have that nobody asked for, for the end of a message."""
        trouble = f" ({self.link.trouble})" if self.link.trouble else ""
        return f"{self.bag.expected.tags_instead(tag, self.src)}{trouble}"

    def farewell(self) -> str | None:
        """Return what the sender said as it closed the group, None where it has not; it may have failed."""
        state, text = self.bag.said.get(self.src, (0, ""))
        return text if state == LEFT else None

    def arm(self, bell: Doorbell) -> bool:
        """Have `bell` ring when something comes; return True, as it can."""
        watch(self._wire, bell)
        return True

    def disarm(self, bell: Doorbell) -> None:
        """Take back `arm`."""
        unwatch(self._wire, bell)

    def deliver(self, parcel: Parcel, receipt: Receipt) -> None:
        """Give a message that was kept to the receipt that asks for it."""
        hand_over(parcel, receipt, self.link, self.bag)

    def asked(self, parcel: Parcel, receipt: Receipt) -> None:
        """Have a message, which has come or is announced, come to the receipt that asks for it."""
        if isinstance(parcel, LongParcel):
            parcel.claim(receipt)


class InCollective:
    """Where a message of a collective comes from: that it never comes may be the doing of any rank of the group.

    Args:
        backend: The backend that it is for.
        inbox: The inbox of the rank that sends it, which may be on this host.
        wire: The wire.
        bag: What comes for the group.
    """

    def __init__(self, backend: Backend, inbox: Inbox | WireInbox, wire: Wire, bag: Bag) -> None:
        self.description = inbox.description
        self.looking_s = inbox.looking_s
        self._options = backend.options
        self._inbox = inbox
        self._wire = wire
        self._bag = bag
        self.move = inbox.move
        self.look_again = inbox.look_again
        self.inboxes = inbox.inboxes
        self.tags_instead = inbox.tags_instead

    def check(self) -> None:
        """Raise DistBackendError if nothing more can come."""
        self._wire.drive()
        check_all(self._options, self._bag, self._wire)
        self._inbox.check()
