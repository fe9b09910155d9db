"""Sends messages to one other rank of this host, in order."""

from __future__ import annotations

import os
import threading
from collections import deque

import numpy as np

from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.base import Backend, FastPath
from meshdist.backends.gloo.match import GlooMatchQueue, PendingSends
from meshdist.backends.gloo.published import check_withdrawn, publish_channel
from meshdist.backends.gloo.shm.channel import (
    EAGER,
    MODE,
    READS,
    RTS,
    RTS_CMA,
    SENDER,
    TAKEN,
    TOKEN,
    TOKEN_VALUE,
    UNKNOWN,
    Channel,
    Header,
    Peer,
    channel_bytes,
)
from meshdist.backends.gloo.shm.fast_path import shm_fast_send
from meshdist.backends.gloo.shm.segment import create
from meshdist.backends.gloo.shm.single_copy import Memory, address_of, allow_peers
from meshdist.backends.gloo.shm.split_copy import SplitWrite
from meshdist.backends.p2p.eager_messages import MessageKind
from meshdist.backends.p2p.requests import SendRequest
from meshdist.errors import DistError
from meshdist.runtime.departure import Departure, LeftOut
from meshdist.runtime.waiting import Doorbell, Waitable

# The longest message that goes through the ring although the receiver could read the sender's memory: both sides copy
# at the same time, and the ring stays in the cache. (The core tries both.) Longer ones are copied by both sides
# between the arrays, which took two thirds to nine tenths of the time from 8 MiB on, between 2 ranks on 2 cores. In
# an exchange both sides are busy with what they receive, so that what does not fit into the ring would wait there.
RING_MESSAGE_BYTES, EXCHANGED_RING_MESSAGE_BYTES = 4 << 20, 2 << 20


class ShmSender:
    """Sends messages to one rank, in order. Any thread may post, and writes what others have posted (`waiting`)."""

    def __init__(self, backend: Backend, dst: int, queue: GlooMatchQueue) -> None:
        backend.options.deferred_cleanup.try_all()
        self.peer = Peer(backend, dst)
        self._backend, self._options, self._dst = backend, backend.options, dst
        segment = create(channel_bytes(backend.size), [self.peer.card.pid])
        self.channel = Channel(segment, SENDER)
        allow_peers(backend.options)
        self._token = np.array([os.getpid() ^ id(self)])
        self.channel.words[TOKEN], self.channel.words[TOKEN_VALUE] = address_of(self._token), self._token[0]
        self.lock = threading.Lock()
        self.waiting: deque[ShmSendRequest] = deque()
        self.queue = queue
        self.numbered = 0
        self._begun: dict[int, LongSendRequest] = {}  # by the core, which no one waits for yet
        self._has_left = False
        self.memory = Memory(self.peer.card.pid, self.peer.description)
        publish_channel(backend.options, backend.rank, dst, segment.place)
        backend.options.deferred_cleanup.add(self._give_back)

    def post(self, array: Array, tag: int, dtype_name: bytes, eager_bytes: int) -> Waitable:
        if self.channel.has_left():
            self.peer.check_state(self.channel, LeftOut.RECEIVE)
        with self.lock:
            if array.nbytes > eager_bytes:
                self.numbered += 1
                header = Header(RTS, tag, array.nbytes, dtype_name, address_of(array), self.numbered)
                request: ShmSendRequest = LongSendRequest(self, array, header)
            else:
                request = ShmSendRequest(self, array, Header(EAGER, tag, array.nbytes, dtype_name))
            self.waiting.append(request)
            self._write()
        return request

    def fast_path(self, kind: MessageKind) -> FastPath | None:
        return shm_fast_send(self, kind)

    def write_on(self, array: Array, number: int, written: int, dtype_name: bytes, tag: int) -> None:
        """Go on with a message that the core has begun to write; it has locked the channel."""
        header = Header(RTS, tag, array.nbytes, dtype_name, address_of(array), number)
        request = self._begun[number] = LongSendRequest(self, array, header, written)
        self.waiting.append(request)
        self.queue.pending.add(self)

    def finish(self, data: Array | bytes, number: int, error_prefix: str, dtype_name: bytes, tag: int) -> None:
        """Wait until a message is received that the core has written or announced: an array, or a pickle."""
        request = self._begun.pop(number, None)
        if request is None:
            array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
            header = Header(RTS, tag, array.nbytes, dtype_name, address_of(array), number)
            request = LongSendRequest(self, array, header, array.nbytes)
        self._backend.wait(request, error_prefix)

    def follow(self, array: Array, number: int, dtype_name: bytes, tag: int) -> LongSendRequest:
        """Return the request of a message that the core has announced, to be copied between the arrays."""
        header = Header(RTS_CMA, tag, array.nbytes, dtype_name, address_of(array), number)
        return LongSendRequest(self, array, header, array.nbytes)

    def check(self) -> None:
        if self.channel.words[MODE] == UNKNOWN:
            # The receiver has not opened the channel, so it can only leave through the store.
            check_withdrawn(self._options, self._dst, LeftOut.RECEIVE)
        else:
            self.peer.check(self.channel, LeftOut.RECEIVE)

    def advance(self) -> None:
        with self.lock:
            self._write()

    def arm(self, bell: Doorbell) -> bool:
        self.channel.sleep_on(bell.number)
        return True

    def disarm(self, bell: Doorbell) -> None:
        self.channel.wake_up(bell.number)

    @property
    def global_rank(self) -> int:
        return self.peer.global_rank

    @property
    def group_name(self) -> str:
        return self._options.name

    def end(self, departure: Departure) -> None:
        self._has_left = True
        self.channel.leave(departure)
        self.peer.wake(self.channel)

    def _write(self) -> None:
        while self.waiting and self.waiting[0].write(self.channel):
            self.waiting.popleft()
        if self.waiting:
            self.queue.pending.add(self)
        else:
            self.queue.pending.discard(self)
        if self.channel.sleepers():
            self.peer.wake(self.channel)

    def _give_back(self) -> bool:
        """Give the descriptor back once the receiver has opened the channel, or will not; return whether that is so."""
        is_awaited = self.channel.words[MODE] == UNKNOWN
        if is_awaited and self._has_left:  # else it is used, and the store need not be asked
            try:
                check_withdrawn(self._options, self._dst, LeftOut.RECEIVE)
            except DistError:
                is_awaited = False
        if not is_awaited:
            self.channel.segment.seal()
        return not is_awaited


class ShmSendRequest(SendRequest):
    """A message that is done once it is written."""

    def __init__(self, sender: ShmSender, array: Array, header: Header) -> None:
        self.sender = sender
        self.header = header
        self.data = as_bytes(array)
        self._armed: set[PendingSends] = set()

    def write(self, channel: Channel) -> bool:
        """Write as much as there is room for; return True when the next message may be written."""
        if channel.has_room(self.data.size):
            channel.announce(self.header)
            channel.fill(self.data, 0)
            self.done = True
        return self.done

    def ready(self) -> bool:
        if not self.done:
            self.sender.queue.progress_sends()
        return self.done

    def check(self) -> None:
        self.sender.check()

    def arm(self, bell: Doorbell) -> None:
        self._armed = {self.sender, *self.sender.queue.pending}
        for sends in self._armed:
            sends.arm(bell)

    def disarm(self, bell: Doorbell) -> None:
        for sends in self._armed:
            sends.disarm(bell)

    def receiver_words(self) -> str:
        return self.sender.peer.description

    def full_buffer(self) -> str:
        if self.done or self.header.kind != EAGER or self.header.tag < 0:
            return ""
        with self.sender.lock:
            has_no_room = bool(self.sender.waiting) and self.sender.waiting[0].header.kind == EAGER
        kibibytes = self.sender.channel.ring_bytes >> 10
        return f"the receiver's buffer of {kibibytes} KiB for unreceived messages is full" if has_no_room else ""

    def awaits(self) -> list[int]:
        # It also has to read the messages of this rank that are written before.
        return [] if self.done or self.sender.queue.arriving else [self.sender.global_rank]

    def sends_to(self) -> list[int]:
        return self.sender.queue.sends_besides(self.sender)

    def sends_in(self) -> str:
        return self.sender.group_name


class LongSendRequest(ShmSendRequest):
    """A message that is done once it is received: through the ring, or copied by both sides between the arrays.

    The core has announced it already if it says how much of it is `written`.
    """

    def __init__(self, sender: ShmSender, array: Array, header: Header, written: int | None = None) -> None:
        super().__init__(sender, array, header)
        self._is_announced = written is not None
        self._written = written or 0
        self._split: SplitWrite | None = None
        if header.kind == RTS_CMA:
            self._begin_split()

    def write(self, channel: Channel) -> bool:
        if not self._is_announced and not self._announce(channel):
            return False
        number, size = self.header.number, self.data.size
        if self.header.kind == RTS_CMA:
            return True
        if channel.words[TAKEN] >= number:
            channel.cut(number)
            return True
        # A peer that sends as well does not make room meanwhile: read its message first.
        self._written = channel.fill(self.data, self._written, polls=not self.sender.queue.awaits_messages)
        if self._written == size:
            channel.mark_written(number)
        return self._written == size

    def ready(self) -> bool:
        self.sender.queue.progress_sends()
        # A peer that sends as well reads this message alone, as this rank does with that of the peer.
        if self._split is not None and not self.done and not self.sender.queue.awaits_messages:
            self._write_split(self._split)
        if not self.done and self.sender.channel.words[TAKEN] >= self.header.number:
            self.done = True
            self.sender.queue.announced.discard(self)
            self.sender.queue.progress_sends()  # cut the message, if it is not complete
        return self.done

    def _write_split(self, split: SplitWrite) -> None:
        sender = self.sender
        wrote = True
        while wrote:
            with sender.lock:
                wrote = split.write_piece()
        # Also after a claim in vain: the receiver may sleep because of it.
        if sender.channel.sleepers():
            sender.peer.wake(sender.channel)

    def _announce(self, channel: Channel) -> bool:
        queue = self.sender.queue
        if self.data.size > (EXCHANGED_RING_MESSAGE_BYTES if queue.awaits_messages else RING_MESSAGE_BYTES):
            mode = channel.words[MODE]
            if mode == UNKNOWN:
                return False
            if mode == READS:
                self.header = self.header._replace(kind=RTS_CMA)
                self._begin_split()
        self._is_announced = channel.announce(self.header)
        return self._is_announced

    def _begin_split(self) -> None:
        self._split = SplitWrite(self.sender.channel, self.sender.memory, self.header, self.data)
        self.sender.queue.announced.add(self)
