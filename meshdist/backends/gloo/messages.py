"""send and recv between two ranks of a host.

A message of up to the eager limit is copied into the channel's ring, and the sender goes on. A longer one is announced
there; the receiver reads it straight out of the sender's array where it can (`READS`), else it comes piece by piece
through the ring (`STREAMS`). Either way it is done when the receiver has it.

Messages that no receipt asks for, because of their tag, are kept aside until one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Incoming
from meshdist.backends.gloo.anybody import Anybody
from meshdist.backends.gloo.channel import RING_BYTES
from meshdist.backends.gloo.inbox import Expected, Inbox, Receipt
from meshdist.backends.gloo.outbox import Outbox
from meshdist.backends.gloo.peer import FAILED, LEFT
from meshdist.backends.matching import eager_bytes
from meshdist.deadline import Deadline
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

# An entry of up to half the ring finds room whatever was written before it.
_LARGEST_ENTRY = RING_BYTES // 2 - 128
_DELIVERY_S = 5.0


class DtypeNames(dict["np.dtype[Any]", bytes]):
    """The names of dtypes as headers carry them, made once: NumPy takes microseconds to say one."""

    def __missing__(self, dtype: np.dtype[Any]) -> bytes:
        name = self[dtype] = str(dtype).encode()[:16].ljust(16, b"\0")
        return name


class Mail:
    """The channels of one rank in its group, made when they are first used."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._names = DtypeNames()
        self._eager_bytes = min(eager_bytes(), _LARGEST_ENTRY)
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._expected = Expected()
        self._anybody = Anybody(backend, self._inboxes, self._inbox, self._expected)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        """Post a message."""
        outbox = self._outboxes.get(dst)
        if outbox is None:
            outbox = self._outboxes[dst] = Outbox(self._backend, dst)
        return outbox.post(array, tag, self._names[array.dtype], self._eager_bytes)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        """Post the receipt of a message, from one rank or from any."""
        name = self._names[array.dtype]
        if src is None:
            receipt = Receipt(array, name, self._anybody, tag)
        else:
            receipt = Receipt(array, name, self._inboxes.get(src) or self._inbox(src), tag)
        with self._expected.lock:
            parcel = self._expected.matching.ask(receipt, src, tag)
            if parcel is None:
                return receipt
            parcel.receipt = receipt
            complete = parcel.complete
        if complete:
            self._inbox(parcel.source).deliver(parcel, receipt)
        return receipt

    def send_at_once(self, array: Array, dst: int, tag: int) -> bool:
        """Send a message that there is room for, behind all that were sent before; return whether it was."""
        outbox = self._outboxes.get(dst)
        return (
            outbox is not None
            and array.nbytes <= self._eager_bytes
            and outbox.post_at_once(array, tag, self._names[array.dtype])
        )

    def receive_at_once(self, array: Array, src: int, tag: int) -> bool:
        """Receive the next message of a rank if it fits, and nothing else is expected; return whether it did."""
        inbox = self._inboxes.get(src)
        return inbox is not None and inbox.take(array, self._names[array.dtype], tag)

    def fail(self, reason: str) -> None:
        """Tell all with whom there is a channel that this rank gives up."""
        self._end(FAILED, reason)

    def leave(self, farewell: str) -> None:
        """Let what was sent be picked up, and end the channels."""
        deadline = Deadline(_DELIVERY_S)
        for outbox in self._outboxes.values():
            outbox.deliver(deadline)
        self._end(LEFT, farewell)

    def _inbox(self, src: int) -> Inbox:
        with self._expected.lock:
            inbox = self._inboxes.get(src)
            if inbox is None:
                inbox = self._inboxes[src] = Inbox(self._backend, src, self._expected)
        return inbox

    def _end(self, state: int, text: str) -> None:
        for outbox in list(self._outboxes.values()):
            outbox.end(state, text)
        for inbox in list(self._inboxes.values()):
            inbox.end(state, text)
