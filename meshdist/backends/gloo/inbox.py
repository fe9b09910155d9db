"""Inbox: the messages from one other rank, and the receipts that ask for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshdist.arrays import Array, describe_array
from meshdist.backends.base import Incoming
from meshdist.backends.gloo.channel import (
    CHANNEL_BYTES,
    LONG,
    MODE,
    PIECE,
    READS,
    RECEIVER,
    STREAMS,
    TAKEN,
    TOKEN,
    TOKEN_VALUE,
    WHOLE,
    Channel,
    Header,
    as_bytes,
)
from meshdist.backends.gloo.peer import LEFT, Peer
from meshdist.backends.gloo.published import Published, channel_key
from meshdist.backends.gloo.segment import find
from meshdist.backends.gloo.single_copy import Reader, may_read
from meshdist.backends.matching import Matching, there_are
from meshdist.errors import DistBackendError
from meshdist.waiting import Doorbell

if TYPE_CHECKING:
    from meshdist.backends.base import Backend


_LEFT_OUT = "sending a message"
# How often a receiver looks, and then how long, letting others run, before it posts a receipt, which a peer that comes
# late needs.
_LOOKS, _LOOKING_S = 60, 0.0002


class Expected:
    """What a rank expects from all others: the receipts and messages without a partner, and the lock over them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.matching: Matching[Parcel, Receipt] = Matching()

    def tags_instead(self, tag: int, source: int | None) -> str:
        """Return, for the end of a message, a tag that is waited for, and those of messages that nobody asked for."""
        if tag < 0:  # of a collective's own messages
            return ""
        with self.lock:
            kept = sorted({parcel.header[1] for parcel in self.matching.kept(source) if parcel.header[1] >= 0})
        return f" with tag {tag}{there_are(kept)}"


class Parcel:
    """A message that nobody asked for when it came.

    Attributes:
        source: The rank in the group that sent it.
        header: Its header.
        data: Its bytes, once it is complete.
        complete: All of it is there.
        receipt: Who asked for it before it was.
    """

    def __init__(self, source: int, header: Header) -> None:
        self.source = source
        self.header = header
        self.data = np.empty(header[2], np.uint8)
        self.complete = False
        self.receipt: Receipt | None = None


class Sleepable(Protocol):
    """Something that rings a bell when a message has come."""

    def arm(self, bell: Doorbell) -> bool:
        """Ask for `bell` to be rung; return False, and do nothing, where nothing can come yet."""

    def disarm(self, bell: Doorbell) -> None:
        """Take back `arm`."""


class Origin(Protocol):
    """Where a message comes from: one rank, or any.

    Attributes:
        description: What messages call it.
        looking_s: How long it pays to look before sleeping.
    """

    description: str
    looking_s: float

    def move(self, receipt: Receipt) -> None:
        """Read on until `receipt` has its message, or there is nothing more to read."""

    def check(self) -> None:
        """Raise DistBackendError if nothing more can come."""

    def look_again(self) -> None:
        """Have the next `move` ask the store for new channels, however short ago that was done."""

    def inboxes(self) -> Sequence[Sleepable]:
        """Return the inboxes of the ranks that have sent something, and maybe of others."""

    def tags_instead(self, tag: int) -> str:
        """Return what other tags messages from there have that nobody asked for, for the end of a message."""


class Receipt(Incoming):
    """A message that is asked for.

    Args:
        array: Where to.
        dtype_name: The dtype that it must have.
        origin: Where it comes from.
        tag: The tag that it must have.
    """

    def __init__(
        self,
        array: Array,
        dtype_name: bytes,
        origin: Origin,
        tag: int,
    ) -> None:
        self.done = False
        self.source = -1
        self.looking_s = origin.looking_s
        self._array = array
        self._dtype_name = dtype_name
        self._origin = origin
        self._tag = tag
        self._error: DistBackendError | None = None
        self._bell: Doorbell | None = None
        self._armed: list[Sleepable] = []

    def fit(self, source: int, header: Header, describe: Callable[[], str]) -> Array | None:
        """Return the bytes of the array for a message; None where the message does not fit, which ends the receipt.

        Args:
            source: The rank in the group that sent it.
            header: What it says of itself.
            describe: Returns what messages call that rank.
        """
        self.source = source
        num_bytes, dtype = header[2], header[5]
        if num_bytes == self._array.nbytes and dtype == self._dtype_name:
            return as_bytes(self._array)
        name = dtype.rstrip(bytes(1)).decode()
        self._error = DistBackendError(
            f"the message from {describe()} is {num_bytes} bytes of {name},"
            f" the array to receive it is {describe_array(self._array)}, {self._array.nbytes} bytes"
        )
        self.finish()
        return None

    def finish(self) -> None:
        """Say that it is there, to the thread that waits for it as well: another one may have moved the channel."""
        self.done = True
        if self._bell is not None:
            self._bell.ring()

    def ready(self) -> bool:
        if not self.done:
            self._origin.move(self)
        if self._error is not None:
            raise self._error
        return self.done

    def check(self) -> None:
        self._origin.check()

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell
        if not self.done:
            # A channel that is found only later would not know that somebody sleeps.
            self._origin.look_again()
            self._origin.move(self)
        self._armed = [inbox for inbox in self._origin.inboxes() if inbox.arm(bell)]

    def disarm(self, bell: Doorbell) -> None:
        self._bell = None
        for inbox in self._armed:
            inbox.disarm(bell)

    def missing(self) -> str:
        return f"a message from {self._origin.description}{self._origin.tags_instead(self._tag)}"


class Inbox:
    """The messages from one rank. One thread at a time moves them on, whoever they are for."""

    def __init__(self, backend: Backend, src: int, expected: Expected) -> None:
        self.peer = Peer(backend, src)
        self.description = self.peer.description
        self.looking_s = Incoming.looking_s
        self.channel: Channel | None = None
        self._src = src
        self._expected = expected
        self._place = Published(backend.options, channel_key(src, backend.rank), src, _LEFT_OUT)
        self._reader = Reader(self.peer.card.pid, self.peer.description)
        self._moving = threading.Lock()
        # The long message that is coming in pieces: whose it is, where to, how much is there.
        self._coming: tuple[Header, Receipt | Parcel | None, Array] | None = None
        self._there = 0

    def move(self, receipt: Receipt) -> None:
        """Read on until `receipt` has its message, or there is nothing more to read."""
        if self.channel is not None and self.channel.is_empty():
            return
        # Where another thread is at it, it will look for whatever comes, or this one will look again.
        if not self._moving.acquire(False):
            return
        try:
            if self.channel is not None or self._connect():
                while not receipt.done and self._read_entry():
                    pass
        finally:
            self._moving.release()

    def check(self) -> None:
        """Raise DistBackendError if nothing more can come."""
        if self.channel is not None:
            self.peer.check(self.channel, _LEFT_OUT)
            return
        try:
            self._place.check()
        except DistBackendError:
            # What it sent before it ended is still there to be read.
            if self.peer.ended() or not self._place.look():
                raise

    def look_again(self) -> None:
        """Have the next `move` ask for the channel, however short ago that was done."""
        self._place.look_again()

    def inboxes(self) -> list[Inbox]:
        """Return this inbox, as those that a receipt of one rank waits for."""
        return [self]

    def tags_instead(self, tag: int) -> str:
        """Return what other tags messages have that nobody asked for, for the end of a message."""
        return self._expected.tags_instead(tag, self._src)

    def take(self, array: Array, dtype_name: bytes, tag: int) -> bool:
        """Read the next message into `array`, if it comes in a moment, fits, and nobody else waits for any."""
        channel = self.channel
        if channel is None:
            return False
        looks, end = _LOOKS, 0.0
        while channel.is_empty():
            looks -= 1
            if looks < 0:
                end = end or monotonic() + _LOOKING_S
                os.sched_yield()
                if monotonic() > end:
                    return False
        if not self._moving.acquire(False):
            return False
        try:
            with self._expected.lock:
                taken = self._expected.matching.is_idle and channel.take(tag, dtype_name, array)
        finally:
            self._moving.release()
        if taken and channel.sleepers():
            self.peer.wake(channel)
        return taken

    @property
    def is_heard(self) -> bool:
        """Whether the rank has been heard of."""
        return self.channel is not None

    def arm(self, bell: Doorbell) -> bool:
        """Ask the sender to ring `bell`; return False where there is no channel yet."""
        if self.channel is None:
            return False
        self.channel.sleep_on(bell.number)
        return True

    def disarm(self, bell: Doorbell) -> None:
        """Take back `arm`."""
        if self.channel is not None:
            self.channel.wake_up(bell.number)

    def asked(self, parcel: Parcel, receipt: Receipt) -> None:
        """Do nothing for a parcel that is asked for before it is complete: it is on its way."""

    def farewell(self) -> str | None:
        """Return what the sender said as it closed the group, None where it has not; it may have failed."""
        state, text = self.channel.state() if self.channel is not None else (0, "")
        return text if state == LEFT else None

    def end(self, state: int, text: str) -> None:
        """Say that nothing more will be received."""
        if self.channel is not None:
            self.channel.say(state, text)
            self.peer.wake(self.channel)

    def deliver(self, parcel: Parcel, receipt: Receipt) -> None:
        """Give a message that was kept to the receipt that asks for it."""
        target = receipt.fit(self._src, parcel.header, self.peer.describe)
        if target is not None:
            target[...] = parcel.data
            receipt.finish()

    def _connect(self) -> bool:
        # The sender makes the channel with its first message.
        if not self._place.ready():
            return False
        assert self._place.value is not None
        channel = Channel(find(self._place.value, CHANNEL_BYTES, only_reader=True), RECEIVER)
        channel.words[MODE] = READS if self._can_read(channel) else STREAMS
        self.channel = channel
        self.peer.wake(channel)
        return True

    def _can_read(self, channel: Channel) -> bool:
        token = np.zeros(1, np.int64)
        return (
            may_read() and self._reader.try_read(channel.words[TOKEN], token) and token[0] == channel.words[TOKEN_VALUE]
        )

    def _read_entry(self) -> bool:
        channel = self.channel
        assert channel is not None
        entry = channel.peek()
        if entry is None:
            return False
        header, payload = entry
        if header[0] == PIECE:
            self._piece(channel, payload)
            return True
        owner, target = self._place_for(header)
        if header[0] == WHOLE and target is not None:
            target[...] = payload
        channel.drop(payload)
        if header[0] == LONG and channel.words[MODE] == STREAMS and header[2]:
            # What does not fit comes as well, and is thrown away.
            self._coming, self._there = (header, owner, np.empty(header[2], np.uint8) if target is None else target), 0
            return True
        if header[0] == LONG and target is not None:
            self._reader.read(header[3], target)
        self._complete(channel, header, owner)
        return True

    def _place_for(self, header: Header) -> tuple[Receipt | Parcel | None, Array | None]:
        expected = self._expected
        with expected.lock:
            receipt = expected.matching.come(self._src, header[1])
            if receipt is None:
                # From now on it can be asked for, although it is not there yet.
                parcel = Parcel(self._src, header)
                expected.matching.keep(parcel, self._src, header[1])
                return parcel, parcel.data
        target = receipt.fit(self._src, header, self.peer.describe)
        return (None, None) if target is None else (receipt, target)

    def _piece(self, channel: Channel, payload: Array) -> None:
        assert self._coming is not None
        header, owner, target = self._coming
        target[self._there : self._there + payload.size] = payload
        self._there += payload.size
        channel.drop(payload)
        if self._there == target.size:
            self._coming = None
            self._complete(channel, header, owner)
        else:
            self.peer.wake(channel)

    def _complete(self, channel: Channel, header: Header, owner: Receipt | Parcel | None) -> None:
        if isinstance(owner, Parcel):
            with self._expected.lock:
                owner.complete = True
                receipt = owner.receipt
            if receipt is not None:
                self.deliver(owner, receipt)
        elif owner is not None:
            owner.finish()
        if header[0] == LONG and owner is not None:
            channel.words[TAKEN] = header[4]
        if channel.sleepers():
            self.peer.wake(channel)
