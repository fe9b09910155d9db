"""Outbox: the messages from this rank to one other, in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array, as_bytes
from meshdist.backends.base import Express
from meshdist.backends.gloo.channel import (
    CHANNEL_BYTES,
    ELSEWHERE,
    LONG,
    MODE,
    READS,
    SENDER,
    TAKEN,
    TOKEN,
    TOKEN_VALUE,
    UNKNOWN,
    WHOLE,
    Channel,
    Header,
)
from meshdist.backends.gloo.express import express_to
from meshdist.backends.gloo.joint_copy import JointWriting
from meshdist.backends.gloo.peer import Peer
from meshdist.backends.gloo.published import check_withdrawn, publish_channel
from meshdist.backends.gloo.receipts import Expected, Unwritten
from meshdist.backends.gloo.segment import create
from meshdist.backends.gloo.single_copy import Memory, address_of, allow_peers
from meshdist.deadline import Deadline
from meshdist.errors import DistError
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

# The longest message that goes through the ring where the receiver could read the sender's memory: while one copies in
# the next piece the other copies out the last, and the ring stays in the cache. Longer ones are copied by both at once,
# which took two thirds to nine tenths of the time from 8 MiB on, between 2 ranks on 2 cores.
RING_MESSAGE_BYTES = 4 << 20
_LEFT_OUT = "receiving the message"


class Outbox:
    """The messages to one rank, in order. Any thread may post, and moves on what others have posted.

    Attributes:
        peer: The rank.
        memory: The memory of its process.
        channel: The channel to it.
        lock: Held by who writes into the channel.
        waiting: What has not been written yet; nothing may be written before it.
        expected: What this rank expects from all, and what it still has to write for them.
    """

    def __init__(self, backend: Backend, dst: int, expected: Expected) -> None:
        leftovers = backend.options.leftovers
        leftovers[:] = [give_back for give_back in leftovers if not give_back()]
        self.peer = Peer(backend, dst)
        self._options, self._dst = backend.options, dst
        segment = create(CHANNEL_BYTES, [self.peer.card.pid])
        self.channel = Channel(segment, SENDER)
        allow_peers()
        self._token = np.array([os.getpid() ^ id(self)])
        self.channel.words[TOKEN], self.channel.words[TOKEN_VALUE] = address_of(self._token), self._token[0]
        self.lock = threading.Lock()
        self.waiting: deque[Dispatch] = deque()
        self.expected = expected
        self._numbered = 0
        self.memory = Memory(self.peer.card.pid, self.peer.description)
        publish_channel(backend.options, backend.rank, dst, segment.place)
        leftovers.append(self._seal)

    def post(self, array: Array, tag: int, dtype_name: bytes, eager_bytes: int) -> Waitable:
        """Append a message."""
        if self.channel.has_said():
            self.peer.check_state(self.channel, _LEFT_OUT)
        with self.lock:
            if array.nbytes > eager_bytes:
                self._numbered += 1
                header = Header(LONG, tag, array.nbytes, dtype_name, address_of(array), self._numbered)
                dispatch: Dispatch = LongDispatch(self, array, header)
            else:
                dispatch = Dispatch(self, array, Header(WHOLE, tag, array.nbytes, dtype_name))
            self.waiting.append(dispatch)
            self._write()
        return dispatch

    def express(self, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes) -> Express | None:
        """Return a short way for messages of a kind, None where there is none."""
        return express_to(self, tag, dtype, shape, dtype_name)

    def check(self) -> None:
        """Raise DistBackendError if the receiver takes no more."""
        if self.channel.words[MODE] == UNKNOWN:
            # It has not found the channel, and so cannot say in it that it never will.
            check_withdrawn(self._options, self._dst, _LEFT_OUT)
        else:
            self.peer.check(self.channel, _LEFT_OUT)

    def advance(self) -> None:
        """Write what there is room for."""
        with self.lock:
            self._write()

    def arm(self, bell: Doorbell) -> bool:
        """Ask the receiver to ring `bell` when it has made room; return True, as it can."""
        self.channel.sleep_on(bell.number)
        return True

    def disarm(self, bell: Doorbell) -> None:
        """Take back `arm`."""
        self.channel.wake_up(bell.number)

    def deliver(self, deadline: Deadline) -> None:
        """Wait until the receiver has found the channel: from then on it does not need this process."""
        pause, pause_s = threading.Event(), 0.001
        while not deadline.expired() and self._is_awaited():
            pause.wait(deadline.slice_s(pause_s))
            pause_s = min(2 * pause_s, 0.016)
        self.channel.segment.seal()

    def _is_awaited(self) -> bool:
        """Return whether the receiver has still to find the channel, and may."""
        if self.channel.words[MODE] != UNKNOWN:
            return False
        try:
            check_withdrawn(self._options, self._dst, _LEFT_OUT)
        except DistError:
            return False
        return True

    def end(self, state: int, text: str) -> None:
        """Say that nothing more will come."""
        self.channel.say(state, text)
        self.peer.wake(self.channel)

    def _write(self) -> None:
        while self.waiting and self.waiting[0].write(self.channel):
            self.waiting.popleft()
        if self.waiting:
            self.expected.unwritten.add(self)
        else:
            self.expected.unwritten.discard(self)
        if self.channel.sleepers():
            self.peer.wake(self.channel)

    def _seal(self) -> bool:
        # Once the receiver has found the channel, it need not be found again.
        found = self.channel.words[MODE] != UNKNOWN
        if found:
            self.channel.segment.seal()
        return found


class Dispatch(Waitable):
    """A message on its way out, which is done once it is written."""

    def __init__(self, outbox: Outbox, array: Array, header: Header) -> None:
        self.outbox = outbox
        self.header = header
        self.data = as_bytes(array)
        self.done = False
        self._armed: set[Unwritten] = set()

    def write(self, channel: Channel) -> bool:
        """Write what there is room for; return True when the next message may be written."""
        if channel.has_room(self.data.size):
            channel.announce(self.header)
            channel.fill(self.data, 0)
            self.done = True
        return self.done

    def ready(self) -> bool:
        if not self.done:
            self.outbox.expected.write_on()
        return self.done

    def check(self) -> None:
        self.outbox.check()

    def arm(self, bell: Doorbell) -> None:
        self._armed = {self.outbox, *self.outbox.expected.unwritten}
        for messages in self._armed:
            messages.arm(bell)

    def disarm(self, bell: Doorbell) -> None:
        for messages in self._armed:
            messages.disarm(bell)

    def missing(self) -> str:
        return f"{self.outbox.peer.description} to receive a message"


class LongDispatch(Dispatch):
    """A message that is done once the receiver has it: through the ring, or copied by both from where it is."""

    def __init__(self, outbox: Outbox, array: Array, header: Header) -> None:
        super().__init__(outbox, array, header)
        self._is_announced = self._is_written = False
        self._written = 0
        self._joint: JointWriting | None = None

    def write(self, channel: Channel) -> bool:
        if not self._is_announced and not self._announce(channel):
            return False
        if self.header.kind == LONG:
            if channel.words[TAKEN] < self.header.number:
                self._written = channel.fill(self.data, self._written)
                self._is_written = self._written == self.data.size
                if self._is_written:
                    channel.say_written(self.header.number)
            else:
                channel.cut(self.header.number)
                self._is_written = True
        else:
            self._is_written = True
        return self._is_written

    def ready(self) -> bool:
        self.outbox.expected.write_on()
        if self._joint is not None and not self.done:
            self._join(self._joint)
        if not self.done and self.outbox.channel.words[TAKEN] >= self.header.number:
            self.done = True
            self.outbox.expected.write_on()  # which cuts it, if it is not written
        return self.done

    def _join(self, joint: JointWriting) -> None:
        outbox = self.outbox
        wrote = True
        while wrote:
            with outbox.lock:
                wrote = joint.write_piece()
        # Also of a piece that was claimed in vain: the receiver may have come to sleep over it.
        if outbox.channel.sleepers():
            outbox.peer.wake(outbox.channel)

    def _announce(self, channel: Channel) -> bool:
        if self.data.size > RING_MESSAGE_BYTES:
            mode = channel.words[MODE]
            if mode == UNKNOWN:
                return False
            if mode == READS:
                self.header = self.header._replace(kind=ELSEWHERE)
                self._joint = JointWriting(channel, self.outbox.memory, self.header, self.data)
        self._is_announced = channel.announce(self.header)
        return self._is_announced
