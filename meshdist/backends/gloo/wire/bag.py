"""Bag: what has come over the wire for one group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from meshdist.backends.gloo import channel
from meshdist.backends.gloo.receipts import Expected, Parcel, Receipt
from meshdist.backends.gloo.wire.connection import Connection, Place
from meshdist.backends.gloo.wire.frames import CALLED, GO, Header, pack
from meshdist.backends.gloo.wire.parts import Parts

if TYPE_CHECKING:
    from meshdist.backends.gloo.wire.link import Link

# Messages that nobody asks for are kept up to here; then their sender waits, unless this rank waits for it.
MOST_KEPT_BYTES = 16 << 20
_NOTHING: Place = (None, None)


class Bag:
    """What has come for one group: messages, and what its ranks have said. It is there before this rank uses the group.

    Attributes:
        parts: The parts of collectives.
        expected: The receipts of the group and the messages that have come, of the ranks of this host as well.
        said: For each rank that has left the group or given it up, which of the two, and a text.
        through: For each of these, how many collectives it had completed: its part in them is done.
        ranks: The global ranks of the group; empty as long as this rank has not used it.
        last_words: The frame in which this rank said that it has closed the group, or given it up; who connects later
            hears it then.
        is_open: False once this rank has closed the group, or it is broken: what comes is thrown away.
    """

    def __init__(self, token: int) -> None:
        self.parts = Parts()
        self.expected = Expected()
        self.said: dict[int, tuple[int, str]] = {}
        self.through: dict[int, int] = {}
        self.ranks: tuple[int, ...] = ()
        self.is_open = True
        self.last_words: tuple[bytes, bytes] | None = None
        self.token = token
        self._kept_bytes = 0

    def asks(self, link: Link) -> bool:
        """Return whether this rank waits for a message that the peer of `link` may have sent."""
        if link.rank not in self.ranks:
            return False
        src = self.ranks.index(link.rank)
        with self.expected.lock:
            return self.parts.expects(src) or self.expected.matching.asks(src)

    def whole(self, link: Link, header: Header, connection: Connection) -> Place:
        """Take the header of a whole message."""
        _, src, _, tag, num_bytes, _, _ = header
        matching = self.expected.matching
        with self.expected.lock:
            receipt = matching.come(src, tag)
            if receipt is None and self._kept_bytes + num_bytes <= MOST_KEPT_BYTES:
                return self._keep(link, header)
        if receipt is None:
            if not (connection.is_closed or link.is_waited_for()):
                connection.hold()
                return _NOTHING
            with self.expected.lock:
                return self._keep(link, header)
        target = receipt.fit(src, _as_entry(header), partial(link.describe, self))
        return _NOTHING if target is None else (target.data, receipt.finish)

    def announced(self, link: Link, header: Header) -> None:
        """Take the announcement of a long message."""
        _, src, _, tag, _, _, _ = header
        matching = self.expected.matching
        with self.expected.lock:
            receipt = matching.come(src, tag)
            if receipt is None:
                parcel = LongParcel(self, link, header)
                # Who waits for one message lets the senders of others go on.
                pulled = matching.asks(src)
                matching.keep(parcel, src, tag)
        if receipt is not None:
            take_long(self, link, header, receipt)
        elif pulled:
            parcel.pull()

    def say(self, header: Header, text: bytes) -> None:
        """Take what a rank says: what it calls, or that it has left the group, or given it up."""
        kind, src, _, _, _, word, _ = header
        if kind == CALLED:
            self.parts.say(src, word, text)
        else:
            self.said.setdefault(src, (kind, text.decode(errors="replace")))
            self.through[src] = word

    def given(self, parcel: WholeParcel) -> None:
        """Learn that a parcel has left the bag."""
        with self.expected.lock:
            self._kept_bytes -= parcel.header.num_bytes

    def completed(self, parcel: Parcel, link: Link) -> None:
        """Learn that a parcel is all there."""
        with self.expected.lock:
            parcel.complete = True
            receipt = parcel.receipt
        if receipt is not None:
            hand_over(parcel, receipt, link, self)

    def _keep(self, link: Link, header: Header) -> Place:
        parcel = WholeParcel(self, header)
        self.expected.matching.keep(parcel, header[1], header[3])
        self._kept_bytes += header[4]
        return parcel.data.data, partial(self.completed, parcel, link)


class WholeParcel(Parcel):
    """A message that came unasked."""

    def __init__(self, bag: Bag, header: Header) -> None:
        super().__init__(header[1], _as_entry(header))
        self.bag = bag


class LongParcel(Parcel):
    """A long message that is announced, and that nobody asked for when it was."""

    def __init__(self, bag: Bag, link: Link, header: Header) -> None:
        super().__init__(header[1], _as_entry(header))
        self._bag = bag
        self._link = link
        self._announcement = header
        self._is_coming = False

    def pull(self) -> None:
        """Have it come, to be kept until somebody asks for it."""
        with self._link.lock:
            if not self._is_coming:
                self._is_coming = True
                then = partial(self._bag.completed, self, self._link)
                _expect(self._bag, self._link, self._announcement, self.data.data, then)

    def claim(self, receipt: Receipt) -> None:
        """Have it come into the array of a receipt, unless it is on its way already."""
        with self._link.lock:
            if not self._is_coming:
                self._is_coming = True
                take_long(self._bag, self._link, self._announcement, receipt)


def hand_over(parcel: Parcel, receipt: Receipt, link: Link, bag: Bag) -> None:
    """Give a message that was kept to the receipt that asks for it."""
    if isinstance(parcel, WholeParcel):
        parcel.bag.given(parcel)
    target = receipt.fit(parcel.source, parcel.header, partial(link.describe, bag))
    if target is not None:
        target[...] = parcel.data
        receipt.finish()


def take_long(bag: Bag, link: Link, header: Header, receipt: Receipt) -> None:
    """Have an announced message come into the array of the receipt that asks for it."""
    target = receipt.fit(header[1], _as_entry(header), partial(link.describe, bag))
    if target is not None:
        _expect(bag, link, header, target.data, receipt.finish)


def _expect(bag: Bag, link: Link, header: Header, place: memoryview, then: Callable[[], None]) -> None:
    _, src, group, _, _, number, _ = header
    link.expect(number, place, then, bag)
    link.say(pack(GO, src, group, number=number))


def _as_entry(header: Header) -> channel.Header:
    """Return a header in the form of a channel's."""
    _, _, _, tag, num_bytes, number, dtype = header
    return channel.Header(channel.LONG, tag, num_bytes, dtype, number=number)
