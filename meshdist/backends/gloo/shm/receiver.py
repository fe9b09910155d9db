"""Receives the messages from one other rank of this host."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.base import Backend, FastPath
from meshdist.backends.gloo.match import GlooMatchQueue, GlooRecvRequest
from meshdist.backends.gloo.published import Published, channel_key, check_why_removed
from meshdist.backends.gloo.shm.channel import (
    EAGER,
    MODE,
    READS,
    RECEIVER,
    RTS,
    RTS_CMA,
    STREAMS,
    TAKEN,
    TOKEN,
    TOKEN_VALUE,
    Channel,
    Header,
    Peer,
    channel_bytes,
)
from meshdist.backends.gloo.shm.fast_path import shm_fast_recv
from meshdist.backends.gloo.shm.segment import find
from meshdist.backends.gloo.shm.single_copy import Memory, await_writers, may_copy
from meshdist.backends.gloo.shm.split_copy import SplitRead
from meshdist.backends.p2p.eager_messages import MessageKind
from meshdist.backends.p2p.requests import UnexpectedMessage
from meshdist.errors import DistBackendError
from meshdist.runtime.departure import Departure, LeftOut
from meshdist.runtime.waiting import Doorbell, Incoming

# How long `end` waits for the thread that reads from the channel.
_READ_S = 1.0


class ShmReceiver:
    """Receives the messages from one rank. One thread at a time reads, for all."""

    connect_error = ""

    def __init__(self, backend: Backend, src: int, queue: GlooMatchQueue) -> None:
        self.peer = Peer(backend, src)
        self.description = self.peer.description
        self.spin_s = Incoming.spin_s
        self.channel: Channel | None = None  # the channel from the rank; None until it has sent something
        self._options = backend.options
        self.src = src
        self._channel_bytes = channel_bytes(backend.size)
        self.queue = queue
        self._place = Published(backend.options, channel_key(src, backend.rank), src, LeftOut.SEND)
        self._memory = Memory(self.peer.card.pid, self.peer.description)
        self.moving = threading.Lock()  # the lock of the reading thread
        # The message being read: its header, the callback of its end, and its target.
        self.coming: tuple[Header, Callable[[], None] | None, Array] | None = None
        self._split: SplitRead | None = None
        self._there = 0
        # The number of a message whose rest was read from the sender's memory, and the size of that rest. Until the
        # sender has finished the message, the ring holds no entry.
        self.left_over: tuple[int, int] | None = None

    def move(self, request: GlooRecvRequest) -> None:
        if self.channel is not None and self._split is None and self.channel.is_empty():
            return
        # If another thread is reading, it delivers to all requests, or this one tries again.
        if not self.moving.acquire(False):
            return
        try:
            if self.channel is not None or self._connect():
                while not request.done and self._read_on():
                    pass
        finally:
            self.moving.release()

    def next_tag(self) -> int | None:
        """Return the tag of the next message, which stays where it is; None if there is none, or one is being read."""
        self._place.poll_now()
        header = self._next()
        return None if header is None else header.tag

    def look(self, tag: int | None) -> UnexpectedMessage | None:
        header = self._next()
        if header is None or (header.tag < 0 if tag is None else header.tag != tag):
            return None
        queue = self.queue
        with queue.lock:
            is_awaited = queue.has_posted(self.src, header.tag)
        return None if is_awaited else UnexpectedMessage(queue, self.src, header.tag, header.num_bytes, header.dtype)

    def _next(self) -> Header | None:
        if not self.moving.acquire(False):
            return None
        try:
            if (self.channel is None and not self._connect()) or self.coming is not None or self.left_over is not None:
                return None
            return None if self.channel is None else self.channel.peek()
        finally:
            self.moving.release()

    def unread_tags(self) -> list[int]:
        """Return the tags of the messages in the channel, if it is open and none is being read."""
        if self.channel is None or not self.moving.acquire(False):
            return []
        try:
            is_between = self.coming is None and self.left_over is None
            return [header.tag for header in self.channel.peek_all()] if is_between else []
        finally:
            self.moving.release()

    def check(self) -> None:
        if self.channel is not None:
            self.peer.check(self.channel, LeftOut.SEND)
            return
        try:
            self._place.check()
        except DistBackendError:
            # Messages that it sent before it ended are still readable.
            if self.peer.ended() or not self._place.read_now():
                raise

    def poll_now(self) -> None:
        self._place.poll_now()

    def receivers(self) -> list[ShmReceiver]:
        return [self]

    @property
    def is_known(self) -> bool:
        return self.channel is not None

    @property
    def awaited(self) -> tuple[int]:
        return (self._options.ranks[self.src],)

    @property
    def reads_in(self) -> str:
        return self._options.name

    def fast_path(self, kind: MessageKind) -> FastPath | None:
        return shm_fast_recv(self, kind)

    def arm(self, bell: Doorbell) -> bool:
        if self.channel is None:
            return False
        self.channel.sleep_on(bell.number)
        return True

    def disarm(self, bell: Doorbell) -> None:
        if self.channel is not None:
            self.channel.wake_up(bell.number)

    def departure(self) -> Departure | None:
        return self.channel.others_departure() if self.channel is not None else None

    def end(self, departure: Departure) -> None:
        if self.channel is not None:
            self.channel.leave(departure)
            self.peer.wake(self.channel)
        if self._split is not None:
            self._settle()

    def _settle(self) -> None:
        # The reading thread may be in the middle of it, but not for long.
        is_mine = self.moving.acquire(timeout=_READ_S)
        try:
            split = self._split
            if split is not None:
                split.revoke()
                await_writers(lambda: split.is_quiet() or self.peer.ended(), [split.target])
        finally:
            if is_mine:
                self.moving.release()

    def _connect(self) -> bool:
        # The sender creates the channel with its first message.
        if not self._place.ready():
            return False
        assert self._place.value is not None
        try:
            segment = find(self._place.value, self._channel_bytes, only_reader=True)
        except DistBackendError as error:
            check_why_removed(self._options, [self.src], LeftOut.SEND, error)
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
        """Read what has arrived of one message; return whether that was all of it."""
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
            target, then = self._place_for(header)
            channel.drop()
            if header.kind == RTS_CMA:
                if target is None:
                    self._complete(channel, header, then)
                    return True
                exchanges = bool(self.queue.announced)
                self._split = SplitRead(channel, self._memory, header, target, all_of_it=exchanges)
                if channel.sleepers():
                    self.peer.wake(channel)
            # A message that does not fit is read as well, and discarded.
            target = np.empty(header.num_bytes, np.uint8) if target is None else target
            self.coming, self._there = (header, then, target), 0
        header, then, target = self.coming
        if not self._take(channel, header, target):
            self.queue.arriving.add(self)
            return False
        self.queue.arriving.discard(self)
        self.coming = self._split = None
        self._complete(channel, header, then)
        return True

    def _take(self, channel: Channel, header: Header, target: Array) -> bool:
        if self._split is not None:
            return self._split.read_on()
        # A peer that receives as well waits for this rank's message: write that first.
        self._there = channel.drain(target, self._there, polls=not self.queue.pending)
        if self._there < target.size and not self._take_rest(channel, header, target[self._there :]):
            self.peer.wake(channel)
            return False
        return True

    def _take_rest(self, channel: Channel, header: Header, rest: Array) -> bool:
        # The sender has not written the next piece: it may be descheduled, asleep, or waiting for another message
        # before it continues, however little is left.
        if header.kind != RTS or channel.words[MODE] != READS:
            return False
        taken = self._memory.try_read(header.address + self._there, rest)
        if taken:
            self.left_over = header.number, rest.size
        return taken

    def _place_for(self, header: Header) -> tuple[Array | None, Callable[[], None] | None]:
        queue, tag, num_bytes, dtype = self.queue, header.tag, header.num_bytes, header.dtype
        with queue.lock:
            request = queue.match(self.src, tag)
            if request is None:
                # Receives can match it from now on, although its bytes are still arriving.
                message = UnexpectedMessage(queue, self.src, tag, num_bytes, dtype)
                queue.add_unexpected(message, self.src, tag)
                return message.allocate(), message.arrived
        target = request.target(self.src, num_bytes, dtype)
        return target, None if target is None else request.complete

    def _complete(self, channel: Channel, header: Header, then: Callable[[], None] | None) -> None:
        if then is not None:
            then()
            if header.kind != EAGER:
                channel.words[TAKEN] = header.number
        if channel.sleepers():
            self.peer.wake(channel)
