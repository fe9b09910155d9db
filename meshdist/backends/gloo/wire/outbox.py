"""Outbox: the messages of a group to one rank of another host, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array, as_bytes
from meshdist.backends.base import Express
from meshdist.backends.gloo.wire.bag import Bag
from meshdist.backends.gloo.wire.connection import Outgoing
from meshdist.backends.gloo.wire.express import express_to
from meshdist.backends.gloo.wire.frames import DATA, LONG, WHOLE, pack
from meshdist.backends.gloo.wire.waiting import Inquiry, OutgoingWait, check_rank
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend
    from meshdist.backends.gloo.wire.wire import Wire

_LEFT_OUT = "receiving the message"
_NOTHING = memoryview(b"")


class WireOutbox:
    """The messages to one rank. Any thread may post.

    A message of up to the eager limit, or of a collective, is sent at once, and is done when the system has it. A
    longer one is announced, and sent when the receiver says that somebody takes it.
    """

    def __init__(self, backend: Backend, dst: int, wire: Wire, bag: Bag) -> None:
        self.link = wire.link(backend.options.ranks[dst])
        self.wire = wire
        self.bag = bag
        self.src = backend.rank
        self.dst = dst
        self._inquiry = Inquiry(backend.options, _LEFT_OUT)
        self._sent = Sent()

    def post(self, array: Array, tag: int, dtype_name: bytes, eager_bytes: int) -> Waitable:
        """Append a message."""
        if self.dst in self.bag.said:
            self.check()
        data, token = as_bytes(array).data, self.bag.token
        if tag >= 0 and len(data) > eager_bytes:
            return LongDispatch(self, data, tag, dtype_name)
        outgoing = Outgoing(pack(WHOLE, self.src, token, tag, len(data), 0, dtype_name), data)
        self.link.send(outgoing)
        return self._sent if outgoing.done else WireDispatch(self, outgoing)

    def express(self, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes) -> Express | None:
        """Return a short way for messages of a kind, None where there is none."""
        return express_to(self, tag, dtype, shape, dtype_name)

    def check(self) -> None:
        """Raise DistBackendError if the receiver takes no more."""
        check_rank(self.bag, self.link, self.dst, _LEFT_OUT)
        self._inquiry.check(self.dst, self.link)


class Sent(Waitable):
    """A message that is on its way: there is nothing to wait for."""

    def ready(self) -> bool:
        return True

    def check(self) -> None:
        return

    def arm(self, bell: Doorbell) -> None:
        return

    def disarm(self, bell: Doorbell) -> None:
        return

    def missing(self) -> str:
        return "nobody"


class WireDispatch(OutgoingWait):
    """A message on its way out."""

    def __init__(self, outbox: WireOutbox, outgoing: Outgoing) -> None:
        super().__init__(outbox.wire, outgoing)
        self._outbox = outbox

    def ready(self) -> bool:
        self._outbox.bag.expected.write_on()
        return super().ready()

    def check(self) -> None:
        self._outbox.check()

    def missing(self) -> str:
        link, bag = self._outbox.link, self._outbox.bag
        trouble = f" ({link.trouble})" if link.trouble else ""
        return f"{link.describe(bag)} to receive a message{trouble}"


class LongDispatch(WireDispatch):
    """A long message on its way out: waits until somebody asks for it, and then until the system has it."""

    def __init__(self, outbox: WireOutbox, data: memoryview, tag: int, dtype_name: bytes) -> None:
        link, src, token = outbox.link, outbox.src, outbox.bag.token
        number = link.announce(self)
        self._data = data
        self._header = pack(DATA, src, token, tag, len(data), number, dtype_name)
        super().__init__(outbox, Outgoing(pack(LONG, src, token, tag, len(data), number, dtype_name), _NOTHING))
        self._is_let_go = False
        link.send(self.outgoing)
        # The answer may be behind something that nobody waited for.
        link.go_on()

    def is_done(self) -> bool:
        """Return True once the array may be changed."""
        return self._is_let_go and self.outgoing.done

    def go(self) -> None:
        """Send the bytes: the receiver has a place for them."""
        self.outgoing = Outgoing(self._header, self._data)
        self.outgoing.then = self.ring
        self._is_let_go = True
        self._outbox.link.send(self.outgoing)
