"""send and recv between two ranks of a host.

A message of up to `EAGER_BYTES` is copied into the channel's ring, and the sender goes on. A longer one is announced
there; the receiver reads it straight out of the sender's array where it can (`READS`), else it comes piece by piece
through the ring (`STREAMS`). Either way it is done when the receiver has it.

Messages that a `recv` does not ask for, because of their tag, are kept aside until one does.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array, describe_array
from meshdist.backends.gloo.channel import (
    CHANNEL_BYTES,
    LONG,
    MODE,
    PIECE,
    READS,
    RECEIVER,
    SENDER,
    STREAMS,
    TAKEN,
    TOKEN,
    TOKEN_VALUE,
    UNKNOWN,
    WHOLE,
    Channel,
    Header,
)
from meshdist.backends.gloo.published import Published, publish
from meshdist.backends.gloo.segment import create, find
from meshdist.backends.gloo.single_copy import Reader, address_of, allow_peers, may_read
from meshdist.deadline import Deadline
from meshdist.doorbells import SocketDoorbells
from meshdist.errors import DistBackendError
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

EAGER_BYTES = 64 << 10
PIECE_BYTES = 64 << 10
_DELIVERY_S = 5.0
_LEFT, _FAILED = 1, 2
_NOTHING = np.empty(0, np.uint8)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


class DtypeNames(dict["np.dtype[Any]", bytes]):
    """The names of dtypes as headers carry them, made once: NumPy takes microseconds to say one."""

    def __missing__(self, dtype: np.dtype[Any]) -> bytes:
        name = self[dtype] = str(dtype).encode()[:16].ljust(16, b"\0")
        return name


class Peer:
    """The other rank of a channel."""

    def __init__(self, backend: Backend, rank: int) -> None:
        assert isinstance(backend.options.bells, SocketDoorbells)
        self._bells = backend.options.bells
        self._options = backend.options
        self.global_rank = backend.options.ranks[rank]
        self.card = self._options.peers.card(self.global_rank)
        self.description = self._options.peers.describe(self.global_rank)

    def ended(self) -> bool:
        """Return True once its process has died."""
        return self._options.peers.ended(self.global_rank)

    def wake(self, channel: Channel) -> None:
        """Ring, if it sleeps on this channel."""
        number = channel.sleeper()
        if number:
            self._bells.ring(self.card.bells, number)

    def check(self, channel: Channel) -> None:
        """Raise DistBackendError if it has given up, left or died."""
        self.check_state(channel)
        self.check_alive()

    def check_alive(self) -> None:
        """Raise DistBackendError if its process has died."""
        if self.ended():
            raise DistBackendError(f"{self.description} has died", peer_failed=True)

    def check_state(self, channel: Channel) -> None:
        """Raise DistBackendError if it said that it has given up or left."""
        state, text = channel.state()
        if state == _FAILED:
            raise DistBackendError(f"{self.description} gave up: {text}", peer_failed=True)
        if state == _LEFT:
            raise DistBackendError(f"{self.description} has destroyed the group", peer_failed=True)


class Mail:
    """The channels of one rank in its group, made when they are first used."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._names = DtypeNames()
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        """Post a message."""
        if dst not in self._outboxes:
            self._outboxes[dst] = Outbox(self._backend, dst)
        return self._outboxes[dst].post(array, tag, self._names[array.dtype])

    def recv(self, array: Array, src: int, tag: int) -> Waitable:
        """Post the receipt of a message."""
        if src not in self._inboxes:
            self._inboxes[src] = Inbox(self._backend, src)
        return Receipt(self._inboxes[src], array, tag, self._names[array.dtype])

    def fail(self, reason: str) -> None:
        """Tell all with whom there is a channel that this rank gives up."""
        self._end(_FAILED, reason)

    def leave(self) -> None:
        """Let what was sent be picked up, and end the channels."""
        deadline = Deadline(_DELIVERY_S)
        for outbox in self._outboxes.values():
            outbox.deliver(deadline)
        self._end(_LEFT, "")

    def _end(self, state: int, text: str) -> None:
        for outbox in self._outboxes.values():
            outbox.end(state, text)
        for inbox in self._inboxes.values():
            inbox.end(state, text)


class Outbox:
    """The messages to one rank, in order."""

    def __init__(self, backend: Backend, dst: int) -> None:
        leftovers = backend.options.leftovers
        leftovers[:] = [give_back for give_back in leftovers if not give_back()]
        self.peer = Peer(backend, dst)
        segment = create(CHANNEL_BYTES, [self.peer.card.pid])
        self.channel = Channel(segment, SENDER)
        allow_peers()
        self._token = np.array([os.getpid() ^ id(self)])
        self.channel.words[TOKEN], self.channel.words[TOKEN_VALUE] = address_of(self._token), self._token[0]
        self._waiting: deque[Dispatch] = deque()
        self._numbered = 0
        publish(backend.options, f"mail/{backend.rank}/{dst}", segment.place, [dst])
        leftovers.append(self._seal)

    def post(self, array: Array, tag: int, dtype_name: bytes) -> Dispatch:
        """Append a message."""
        self.peer.check_state(self.channel)
        self._numbered += 1
        dispatch = Dispatch(self, array, tag, self._numbered, dtype_name)
        self._waiting.append(dispatch)
        self.advance()
        return dispatch

    def advance(self) -> None:
        """Write what there is room for."""
        while self._waiting and self._waiting[0].write(self.channel):
            self._waiting.popleft()
        self.peer.wake(self.channel)

    def deliver(self, deadline: Deadline) -> None:
        """Wait until the receiver has found the channel: from then on it does not need this process."""
        pause = threading.Event()
        while self.channel.words[MODE] == UNKNOWN and not deadline.expired() and not self.peer.ended():
            pause.wait(deadline.slice_s(0.001))
        self.channel.segment.seal()

    def _seal(self) -> bool:
        # Once the receiver has found the channel, it need not be found again.
        found = self.channel.words[MODE] != UNKNOWN
        if found:
            self.channel.segment.seal()
        return found

    def end(self, state: int, text: str) -> None:
        """Say that nothing more will come."""
        self.channel.say(state, text)
        self.peer.wake(self.channel)


class Dispatch(Waitable):
    """A message on its way out."""

    def __init__(self, outbox: Outbox, array: Array, tag: int, number: int, dtype_name: bytes) -> None:
        self._outbox = outbox
        self._array = array
        self._data = _bytes(array)
        self._number = number
        num_bytes = array.nbytes
        what, address = (WHOLE, 0) if num_bytes <= EAGER_BYTES else (LONG, address_of(array))
        self._header: Header = (what, tag, num_bytes, address, number, dtype_name)
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
        self._outbox.peer.check(self._outbox.channel)

    def arm(self, bell: Doorbell) -> None:
        self._outbox.channel.sleep_on(bell.number)

    def disarm(self) -> None:
        self._outbox.channel.sleep_on(0)

    def missing(self) -> str:
        return f"{self._outbox.peer.description} to receive a message"


class Inbox:
    """The messages from one rank, in order, and those of them that nobody has asked for yet."""

    def __init__(self, backend: Backend, src: int) -> None:
        self.peer = Peer(backend, src)
        self.channel: Channel | None = None
        self._place = Published(backend.options, f"mail/{src}/{backend.rank}", src)
        self._reader = Reader(self.peer.card.pid, self.peer.description)
        self._aside: dict[int, deque[tuple[Header, Array]]] = defaultdict(deque)
        # The long message that is coming in pieces: for which receipt (None: aside), where to, how much is there.
        self._coming: tuple[Header, Receipt | None, Array] | None = None
        self._there = 0

    def take(self, receipt: Receipt) -> None:
        """Read on until `receipt` has its message, or there is nothing more to read."""
        if self.channel is None and not self._connect():
            return
        if self._aside[receipt.tag] and not receipt.begun:
            header, data = self._aside[receipt.tag].popleft()
            receipt.fit(header)[...] = data
            receipt.done = True
        while not receipt.done and self._read_entry(receipt):
            pass

    def end(self, state: int, text: str) -> None:
        """Say that nothing more will be received."""
        if self.channel is not None:
            self.channel.say(state, text)
            self.peer.wake(self.channel)

    def _connect(self) -> bool:
        # The sender makes the channel with its first message.
        if not self._place.ready():
            return False
        assert self._place.value is not None
        self.channel = Channel(find(self._place.value, CHANNEL_BYTES), RECEIVER)
        self.channel.words[MODE] = READS if self._can_read(self.channel) else STREAMS
        self.peer.wake(self.channel)
        return True

    def _can_read(self, channel: Channel) -> bool:
        token = np.zeros(1, np.int64)
        return (
            may_read() and self._reader.try_read(channel.words[TOKEN], token) and token[0] == channel.words[TOKEN_VALUE]
        )

    def _read_entry(self, receipt: Receipt) -> bool:
        assert self.channel is not None
        entry = self.channel.peek()
        if entry is None:
            return False
        header, payload = entry
        if header[0] == PIECE:
            self._piece(payload)
            return True
        owner = receipt if header[1] == receipt.tag else None
        target = receipt.fit(header) if owner is not None else np.empty(header[2], np.uint8)
        if header[0] == WHOLE:
            target[...] = payload
        self.channel.drop(payload)
        if header[0] == LONG and self.channel.words[MODE] == STREAMS:
            self._coming, self._there = (header, owner, target), 0
            return True
        if header[0] == LONG:
            self._reader.read(header[3], target)
        self._complete(header, owner, target)
        return True

    def _piece(self, payload: Array) -> None:
        assert self.channel is not None
        assert self._coming is not None
        header, owner, target = self._coming
        target[self._there : self._there + payload.size] = payload
        self._there += payload.size
        self.channel.drop(payload)
        if self._there == target.size:
            self._coming = None
            self._complete(header, owner, target)
        else:
            self.peer.wake(self.channel)

    def _complete(self, header: Header, owner: Receipt | None, target: Array) -> None:
        assert self.channel is not None
        if header[0] == LONG:
            self.channel.words[TAKEN] = header[4]
        if owner is None:
            self._aside[header[1]].append((header, target))
        else:
            owner.done = True
        self.peer.wake(self.channel)


class Receipt(Waitable):
    """A message that is asked for.

    Attributes:
        tag: The tag it has.
        begun: A message has been found that is coming into the array.
        done: It is there.
    """

    def __init__(self, inbox: Inbox, array: Array, tag: int, dtype_name: bytes) -> None:
        self.tag = tag
        self.begun = False
        self.done = False
        self._inbox = inbox
        self._array = array
        self._dtype_name = dtype_name

    def fit(self, header: Header) -> Array:
        """Return the bytes of the array for a message that was found.

        Raises:
            DistBackendError: The message has another size or dtype.
        """
        num_bytes, dtype = header[2], header[5]
        if num_bytes != self._array.nbytes or dtype != self._dtype_name:
            name = dtype.rstrip(bytes(1)).decode()
            raise DistBackendError(
                f"the message from {self._inbox.peer.description} is {num_bytes} bytes of {name},"
                f" the array to receive it is {describe_array(self._array)}, {self._array.nbytes} bytes"
            )
        self.begun = True
        return _bytes(self._array)

    def ready(self) -> bool:
        if not self.done:
            self._inbox.take(self)
        return self.done

    def check(self) -> None:
        channel = self._inbox.channel
        if channel is not None:
            self._inbox.peer.check(channel)
        else:
            self._inbox.peer.check_alive()

    def arm(self, bell: Doorbell) -> None:
        if self._inbox.channel is not None:
            self._inbox.channel.sleep_on(bell.number)

    def disarm(self) -> None:
        if self._inbox.channel is not None:
            self._inbox.channel.sleep_on(0)

    def missing(self) -> str:
        return f"a message from {self._inbox.peer.description}"
