"""send and recv between two ranks: through shared memory where they are on one host, else over the wire.

A message of up to the eager limit is copied into the channel's ring, and the sender goes on. A longer one goes through
the ring as well, in pieces, and is done when the receiver has it. A still longer one is only announced there: the
receiver reads it straight out of the sender's array, where it can (`READS`).

Messages that no receipt asks for, because of their tag, are kept aside until one does.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Express, Incoming
from meshdist.backends.gloo.anybody import Anybody
from meshdist.backends.gloo.channel import RING_BYTES
from meshdist.backends.gloo.inbox import Inbox
from meshdist.backends.gloo.outbox import Outbox
from meshdist.backends.gloo.peer import FAILED, LEFT
from meshdist.backends.gloo.receipts import Expected, Origin, Receipt
from meshdist.backends.gloo.remote_mail import remote_mail
from meshdist.backends.matching import DtypeNames, eager_bytes
from meshdist.deadline import Deadline
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend
    from meshdist.backends.gloo.network.plans import Network
    from meshdist.backends.gloo.wire.inbox import WireInbox
    from meshdist.backends.gloo.wire.outbox import WireOutbox

# An entry of up to half the ring finds room whatever was written before it.
_LARGEST_ENTRY = RING_BYTES // 2 - 128
_DELIVERY_S = 5.0


class Mail:
    """The channels of one rank in its group, made when they are first used."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._names = DtypeNames()
        self._eager_bytes = min(eager_bytes(), _LARGEST_ENTRY)
        self._outboxes: dict[int, Outbox | WireOutbox] = {}
        self._opening = threading.Lock()
        self._inboxes: dict[int, Inbox | WireInbox] = {}
        self._remote = remote_mail(backend)
        self._expected = Expected() if self._remote is None else self._remote.bag.expected
        self._anybody = Anybody(backend, self._inboxes, self._inbox, self._expected)
        for rank in () if self._remote is None else self._remote.ranks:
            self._inbox(rank)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        """Post a message."""
        outbox = self._outboxes.get(dst) or self._outbox(dst)
        return outbox.post(array, tag, self._names[array.dtype], self._eager_bytes)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        """Post the receipt of a message, from one rank or from any."""
        name = self._names[array.dtype]
        if src is not None and self._remote is None:
            receipt = Receipt(array, name, self._inboxes.get(src) or self._inbox(src), tag, self._expected)
        else:
            receipt = Receipt(array, name, self._origin(src, tag), tag, self._expected)
        with self._expected.lock:
            parcel = self._expected.matching.ask(receipt, src, tag)
            if parcel is not None:
                parcel.receipt = receipt
                complete = parcel.complete
        if parcel is None:
            if self._remote is not None:
                self._remote.let_go_on(src)
        elif complete:
            self._inbox(parcel.source).deliver(parcel, receipt)
        else:
            self._inbox(parcel.source).asked(parcel, receipt)
        return receipt

    def express_to(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        """Return what sends messages of a kind to a rank that has been sent something; None where there is nothing."""
        outbox = self._outboxes.get(dst)
        if outbox is None or not self._is_express(dtype, shape):
            return None
        return outbox.express(tag, dtype, shape, self._names[dtype])

    def express_from(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        """Return what receives messages of a kind from a rank that has been heard of; None where there is nothing."""
        inbox = self._inboxes.get(src)
        if inbox is None or not self._is_express(dtype, shape):
            return None
        return inbox.express(tag, dtype, shape, self._names[dtype])

    def network(self) -> Network:
        """Return the collectives of the group, which has ranks on other hosts."""
        from meshdist.backends.gloo.network.plans import Network

        assert self._remote is not None
        return Network(self._backend, self._remote)

    def fail(self, reason: str) -> None:
        """Tell all with whom there is a channel that this rank gives up."""
        self._end(FAILED, reason)
        if self._remote is not None:
            self._remote.fail(reason)

    def leave(self, farewell: str) -> None:
        """Let what was sent be picked up, and end the channels."""
        deadline = Deadline(_DELIVERY_S)
        for outbox in self._outboxes.values():
            if isinstance(outbox, Outbox):
                outbox.deliver(deadline)
        self._end(LEFT, farewell)
        if self._remote is not None:
            self._remote.leave(farewell)

    def _is_express(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        return math.prod(shape) * dtype.itemsize <= self._eager_bytes

    def _origin(self, src: int | None, tag: int) -> Origin:
        if src is None:
            return self._anybody
        if tag < 0 and self._remote is not None:
            return self._remote.in_collective(src, self._inbox(src))
        return self._inboxes.get(src) or self._inbox(src)

    def _outbox(self, dst: int) -> Outbox | WireOutbox:
        # Of two that two threads make at once, the receiver would find one.
        with self._opening:
            outbox = self._outboxes.get(dst)
            if outbox is None:
                remote = self._remote
                if remote is not None and dst in remote.ranks:
                    outbox = remote.outbox(dst)
                else:
                    outbox = Outbox(self._backend, dst, self._expected)
                self._outboxes[dst] = outbox
        return outbox

    def _inbox(self, src: int) -> Inbox | WireInbox:
        with self._expected.lock:
            inbox = self._inboxes.get(src)
            if inbox is None:
                remote = self._remote
                if remote is not None and src in remote.ranks:
                    inbox = remote.inbox(src)
                else:
                    inbox = Inbox(self._backend, src, self._expected)
                self._inboxes[src] = inbox
        return inbox

    def _end(self, state: int, text: str) -> None:
        for box in (*self._outboxes.values(), *self._inboxes.values()):
            if isinstance(box, (Outbox, Inbox)):
                box.end(state, text)
