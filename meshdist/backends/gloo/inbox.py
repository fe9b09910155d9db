"""Inbox: the messages from one other rank."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Express, Incoming
from meshdist.backends.gloo.channel import (
    CHANNEL_BYTES,
    ELSEWHERE,
    LONG,
    MODE,
    READS,
    RECEIVER,
    STREAMS,
    TAKEN,
    TOKEN,
    TOKEN_VALUE,
    WHOLE,
    Channel,
    Header,
)
from meshdist.backends.gloo.express import express_from
from meshdist.backends.gloo.joint_copy import JointReading
from meshdist.backends.gloo.peer import LEFT, Peer
from meshdist.backends.gloo.published import Published, channel_key, check_withdrawn
from meshdist.backends.gloo.receipts import LEFT_OUT, Expected, Parcel, Receipt
from meshdist.backends.gloo.segment import find
from meshdist.backends.gloo.single_copy import Memory, await_writers, may_copy
from meshdist.errors import DistBackendError
from meshdist.waiting import Doorbell

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

# How long who ends the inbox waits for the thread that reads from it.
_READ_S = 1.0


class Inbox:
    """The messages from one rank. One thread at a time moves them on, whoever they are for.

    Attributes:
        peer: The rank.
        description: What messages call it.
        looking_s: How long it pays to look before sleeping.
        channel: The channel from it; None until it has sent something.
        moving: Held by who reads from the channel.
        expected: What this rank expects from all.
        coming: The message that has been begun, if there is one: its header, whose it is, where to.
        left_over: Of a message whose rest was read elsewhere, while the sender is still at it: its number, and how much
            that was. Until it has come to its end, what is in the ring is no entry.
    """

    def __init__(self, backend: Backend, src: int, expected: Expected) -> None:
        self.peer = Peer(backend, src)
        self.description = self.peer.description
        self.looking_s = Incoming.looking_s
        self.channel: Channel | None = None
        self._options = backend.options
        self._src = src
        self.expected = expected
        self._place = Published(backend.options, channel_key(src, backend.rank), src, LEFT_OUT)
        self._memory = Memory(self.peer.card.pid, self.peer.description)
        self.moving = threading.Lock()
        self.coming: tuple[Header, Receipt | Parcel | None, Array] | None = None
        self._joint: JointReading | None = None
        self._there = 0
        self.left_over: tuple[int, int] | None = None

    def move(self, receipt: Receipt) -> None:
        """Read on until `receipt` has its message, or there is nothing more to read."""
        if self.channel is not None and self._joint is None and self.channel.is_empty():
            return
        # Where another thread is at it, it will look for whatever comes, or this one will look again.
        if not self.moving.acquire(False):
            return
        try:
            if self.channel is not None or self._connect():
                while not receipt.done and self._read_on():
                    pass
        finally:
            self.moving.release()

    def check(self) -> None:
        """Raise DistBackendError if nothing more can come."""
        if self.channel is not None:
            self.peer.check(self.channel, LEFT_OUT)
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
        return self.expected.tags_instead(tag, self._src)

    @property
    def is_heard(self) -> bool:
        """Whether the rank has been heard of."""
        return self.channel is not None

    def express(self, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes) -> Express | None:
        """Return a short way for messages of a kind, None where there is none."""
        return express_from(self, tag, dtype, shape, dtype_name)

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
        if self._joint is not None:
            self._settle()

    def _settle(self) -> None:
        # The thread that reads may be in the middle of it, but not for long.
        is_mine = self.moving.acquire(timeout=_READ_S)
        try:
            joint = self._joint
            if joint is not None:
                joint.revoke()
                await_writers(lambda: joint.is_quiet() or self.peer.ended(), [joint.target])
        finally:
            if is_mine:
                self.moving.release()

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
        try:
            segment = find(self._place.value, CHANNEL_BYTES, only_reader=True)
        except DistBackendError:
            check_withdrawn(self._options, self._src, LEFT_OUT)  # it has taken its memory along
            raise
        channel = Channel(segment, RECEIVER)
        channel.words[MODE] = READS if self._can_read(channel) else STREAMS
        self.channel = channel
        self.peer.wake(channel)
        return True

    def _can_read(self, channel: Channel) -> bool:
        token = np.zeros(1, np.int64)
        return (
            may_copy() and self._memory.try_read(channel.words[TOKEN], token) and token[0] == channel.words[TOKEN_VALUE]
        )

    def _read_on(self) -> bool:
        """Read as much of one message as is there; return whether that was all of it."""
        channel = self.channel
        assert channel is not None
        if self.coming is None:
            if self.left_over is not None:
                if not channel.skip(*self.left_over):
                    return False
                self.left_over = None
            header = channel.peek()
            if header is None:
                return False
            owner, target = self._place_for(header)
            channel.drop()
            if header.kind == ELSEWHERE:
                if target is None:
                    self._complete(channel, header, owner)
                    return True
                self._joint = JointReading(channel, self._memory, header, target)
                if channel.sleepers():
                    self.peer.wake(channel)
            # What does not fit comes as well, and is thrown away.
            target = np.empty(header.num_bytes, np.uint8) if target is None else target
            self.coming, self._there = (header, owner, target), 0
        header, owner, target = self.coming
        if not self._take(channel, header, target):
            return False
        self.coming = self._joint = None
        self._complete(channel, header, owner)
        return True

    def _take(self, channel: Channel, header: Header, target: Array) -> bool:
        if self._joint is not None:
            return self._joint.read_on()
        self._there = channel.pour(target, self._there)
        if self._there < target.size and not self._take_rest(channel, header, target[self._there :]):
            self.peer.wake(channel)
            return False
        return True

    def _take_rest(self, channel: Channel, header: Header, rest: Array) -> bool:
        # The sender has not come to write the next piece: it may have no processor to run on, sleep, or wait for
        # another message before it goes on with this one, however little is left.
        if header.kind != LONG or channel.words[MODE] != READS:
            return False
        taken = self._memory.try_read(header.address + self._there, rest)
        if taken:
            self.left_over = header.number, rest.size
        return taken

    def _place_for(self, header: Header) -> tuple[Receipt | Parcel | None, Array | None]:
        expected = self.expected
        with expected.lock:
            receipt = expected.matching.come(self._src, header.tag)
            if receipt is None:
                # From now on it can be asked for, although it is not there yet.
                parcel = Parcel(self._src, header)
                expected.matching.keep(parcel, self._src, header.tag)
                return parcel, parcel.data
        target = receipt.fit(self._src, header, self.peer.describe)
        return (None, None) if target is None else (receipt, target)

    def _complete(self, channel: Channel, header: Header, owner: Receipt | Parcel | None) -> None:
        if isinstance(owner, Parcel):
            with self.expected.lock:
                owner.complete = True
                receipt = owner.receipt
            if receipt is not None:
                self.deliver(owner, receipt)
        elif owner is not None:
            owner.finish()
        if header.kind != WHOLE and owner is not None:
            channel.words[TAKEN] = header.number
        if channel.sleepers():
            self.peer.wake(channel)
