"""Outbox: the messages from this rank to one other, in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.gloo.channel import (
    CHANNEL_BYTES,
    LONG,
    MODE,
    PIECE,
    SENDER,
    STREAMS,
    TAKEN,
    TOKEN,
    TOKEN_VALUE,
    UNKNOWN,
    WHOLE,
    Channel,
    Header,
    as_bytes,
)
from meshdist.backends.gloo.peer import Peer
from meshdist.backends.gloo.published import check_withdrawn, publish_channel
from meshdist.backends.gloo.segment import create
from meshdist.backends.gloo.single_copy import address_of, allow_peers
from meshdist.deadline import Deadline
from meshdist.errors import DistError
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

PIECE_BYTES = 64 << 10
_LEFT_OUT = "receiving the message"
_NOTHING = np.empty(0, np.uint8)


class Outbox:
    """The messages to one rank, in order. Any thread may post, and moves on what others have posted."""

    def __init__(self, backend: Backend, dst: int) -> None:
        leftovers = backend.options.leftovers
        leftovers[:] = [give_back for give_back in leftovers if not give_back()]
        self.peer = Peer(backend, dst)
        self._options, self._dst = backend.options, dst
        segment = create(CHANNEL_BYTES, [self.peer.card.pid])
        self.channel = Channel(segment, SENDER)
        allow_peers()
        self._token = np.array([os.getpid() ^ id(self)])
        self.channel.words[TOKEN], self.channel.words[TOKEN_VALUE] = address_of(self._token), self._token[0]
        self._lock = threading.Lock()
        self._waiting: deque[Dispatch] = deque()
        self._numbered = 0
        self._sent = Sent()
        publish_channel(backend.options, backend.rank, dst, segment.place)
        leftovers.append(self._seal)

    def post(self, array: Array, tag: int, dtype_name: bytes, eager_bytes: int) -> Waitable:
        """Append a message."""
        if self.channel.has_said():
            self.peer.check_state(self.channel, _LEFT_OUT)
        num_bytes = array.nbytes
        with self._lock:
            self._numbered += 1
            if num_bytes > eager_bytes:
                header: Header = (LONG, tag, num_bytes, address_of(array), self._numbered, dtype_name)
            else:
                header = (WHOLE, tag, num_bytes, 0, self._numbered, dtype_name)
                if not self._waiting and self.channel.write(header, array):
                    self._after_write()
                    return self._sent
            dispatch = Dispatch(self, array, header)
            self._waiting.append(dispatch)
            self._write()
        return dispatch

    def post_at_once(self, array: Array, tag: int, dtype_name: bytes) -> bool:
        """Append a message if it has room in the ring; return whether it had."""
        channel = self.channel
        with self._lock:
            if self._waiting or channel.has_said():
                return False
            if not channel.write((WHOLE, tag, array.nbytes, 0, self._numbered + 1, dtype_name), array):
                return False
            self._numbered += 1
        if channel.sleepers():
            self.peer.wake(channel)
        return True

    def check(self) -> None:
        """Raise DistBackendError if the receiver takes no more."""
        if self.channel.words[MODE] == UNKNOWN:
            # It has not found the channel, and so cannot say in it that it never will.
            check_withdrawn(self._options, self._dst, _LEFT_OUT)
        else:
            self.peer.check(self.channel, _LEFT_OUT)

    def advance(self) -> None:
        """Write what there is room for."""
        with self._lock:
            self._write()

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
        while self._waiting and self._waiting[0].write(self.channel):
            self._waiting.popleft()
        self._after_write()

    def _after_write(self) -> None:
        if self.channel.sleepers():
            self.peer.wake(self.channel)

    def _seal(self) -> bool:
        # Once the receiver has found the channel, it need not be found again.
        found = self.channel.words[MODE] != UNKNOWN
        if found:
            self.channel.segment.seal()
        return found


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


class Dispatch(Waitable):
    """A message on its way out."""

    def __init__(self, outbox: Outbox, array: Array, header: Header) -> None:
        self._outbox = outbox
        self._array = array
        self._data = as_bytes(array)
        self._header = header
        self._number = header[4]
        self._announced = False
        self._written = 0
        self._done = False

    def write(self, channel: Channel) -> bool:
        """Write what there is room for; return True when the next message may be written."""
        if self._header[0] == WHOLE:
            self._done = channel.write(self._header, self._data)
            return self._done
        self._announced = self._announced or channel.write(self._header, _NOTHING)
        mode = channel.words[MODE]
        if not self._announced or mode == UNKNOWN:
            return False
        while mode == STREAMS and self._written < self._data.size:
            piece = self._data[self._written : self._written + PIECE_BYTES]
            if not channel.write((PIECE, 0, piece.size, 0, self._number, b""), piece):
                return False
            self._written += piece.size
        return True

    def ready(self) -> bool:
        if self._done:
            return True
        self._outbox.advance()
        self._done = self._done or self._outbox.channel.words[TAKEN] >= self._number
        return self._done

    def check(self) -> None:
        self._outbox.check()

    def arm(self, bell: Doorbell) -> None:
        self._outbox.channel.sleep_on(bell.number)

    def disarm(self, bell: Doorbell) -> None:
        self._outbox.channel.wake_up(bell.number)

    def missing(self) -> str:
        return f"{self._outbox.peer.description} to receive a message"
