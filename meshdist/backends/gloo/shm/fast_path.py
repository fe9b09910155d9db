"""The fast path of small messages over shared memory; see `backends.p2p.eager_messages`.

The core also carries longer messages, which their senders wait for: through the ring, or announced.

A request is used instead if the ring is full, earlier sends wait, a receive is posted, a message is unexpected, or the
peer has left.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sized
from functools import partial
from typing import Any, Protocol

import numpy as np

from meshdist import core
from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.base import FastPath
from meshdist.backends.gloo.match import GlooMatchQueue
from meshdist.backends.gloo.shm.channel import (
    EAGER,
    FIRST_PIECE,
    HEAD,
    MODE,
    PACE,
    RING,
    RTS,
    TAIL,
    TAKEN,
    UNIT,
    WRITTEN,
    Channel,
    Header,
    Peer,
    entry_bytes,
    kind_of,
)
from meshdist.backends.p2p.eager_messages import MessageKind, fast_recv
from meshdist.runtime.waiting import Waitable
from meshdist.system.platform import ranks_share_cores

# Up to here a message is copied in one go, else in pieces, as with a request.
_SHORT_BYTES = FIRST_PIECE
# The longest message that the core announces in an exchange; the copy of one is not interrupted.
LONGEST_ANNOUNCED = 64 << 20
# How often a receiver polls, and then for how long it polls and yields.
_SPINS, _SPIN_S = 60, 0.0002


class RingWriter(Protocol):
    peer: Peer
    channel: Channel
    lock: threading.Lock
    numbered: int
    queue: GlooMatchQueue

    @property
    def waiting(self) -> Sized: ...
    def follow(self, array: Array, number: int, dtype_name: bytes, tag: int) -> Waitable: ...
    def finish(self, data: Array | bytes, number: int, error_prefix: str, dtype_name: bytes, tag: int) -> None: ...
    def write_on(self, array: Array, number: int, written: int, dtype_name: bytes, tag: int) -> None: ...


class RingReader(Protocol):
    src: int
    peer: Peer
    channel: Channel | None
    moving: threading.Lock
    queue: GlooMatchQueue
    coming: tuple[Header, Callable[[], None] | None, Array] | None
    left_over: tuple[int, int] | None


def shm_fast_send(sender: RingWriter, kind: MessageKind) -> FastPath | None:
    """Return a function that sends messages of a kind; None if the ring cannot hold elements of its dtype."""
    channel, lock, waiting = sender.channel, sender.lock, sender.waiting
    dtype, wake = kind.dtype, sender.peer.wake
    if not _is_aligned(dtype) or (core.module is None and not kind.is_eager):
        return None
    words, memory, ring = channel.words, channel.memory, channel.ring_of(dtype)
    others_state, others_bells, ring_bytes = channel.others_state, channel.others_bells, channel.ring_bytes
    itemsize, count, is_flat = dtype.itemsize, math.prod(kind.shape), len(kind.shape) == 1
    header, start, length, last = _entry(kind, channel.ring_bytes)
    start_bytes = len(start)
    if core.module is not None:
        nothing: tuple[str, ...] = ()
        queues = waiting, sender.queue.containers[0], sender.queue.arriving
        return _compiled(False, channel, kind, lock.locked, queues, nothing, sender, nothing)

    def send(array: Array) -> bool:
        with lock:
            head = words[HEAD]
            if waiting or words[others_state] or head + length - words[TAIL] > ring_bytes:
                return False
            place = head % ring_bytes
            if place <= last:
                begin = place + RING
                memory[begin : begin + start_bytes] = start
                begin = (place + UNIT) // itemsize
                ring[begin : begin + count] = array if is_flat else array.reshape(-1)
                words[HEAD] = head + length
            else:
                channel.announce(header)
                channel.fill(as_bytes(array), 0)
        if words[others_bells]:
            wake(channel)
        return True

    return send


def shm_fast_recv(receiver: RingReader, kind: MessageKind) -> FastPath | None:
    """Return a function that receives messages of a kind; None if the sender has no channel yet, or as above."""
    dtype = kind.dtype
    channel, wake, moving, queue = receiver.channel, receiver.peer.wake, receiver.moving, receiver.queue
    if channel is None or not _is_aligned(dtype) or (core.module is None and not kind.is_eager):
        return None
    words, memory, ring = channel.words, channel.memory, channel.ring_of(dtype)
    others_bells, ring_bytes = channel.others_bells, channel.ring_bytes
    itemsize, count, is_flat = dtype.itemsize, math.prod(kind.shape), len(kind.shape) == 1
    _, start, length, last = _entry(kind, channel.ring_bytes)
    start_bytes = len(start)
    if core.module is not None:
        busy = ("coming", "left_over")
        keys = (receiver.src, kind.tag), (None, kind.tag)
        return _compiled(True, channel, kind, moving.locked, queue.containers, keys, receiver, busy)

    def take(array: Array) -> bool | None:
        tail = words[TAIL]
        if words[HEAD] == tail:
            return None if queue.is_idle else False  # a message may have left the ring, as after a probe
        if not moving.acquire(False):
            return False
        try:
            tail = words[TAIL]
            place = tail % ring_bytes
            begin = place + RING
            if words[HEAD] == tail or memory[begin : begin + start_bytes] != start:
                return False
            # The next entry may be the rest of a message in progress, or belong to another receive.
            if receiver.coming is not None or receiver.left_over is not None or not queue.is_idle:
                return False
            if place <= last and words[HEAD] - tail >= length:
                begin = (place + UNIT) // itemsize
                (array if is_flat else array.reshape(-1))[...] = ring[begin : begin + count]
                words[TAIL] = tail + length
            elif not channel.read_whole(as_bytes(array)):
                return False
        finally:
            moving.release()
        if words[others_bells]:
            wake(channel)
        return True

    return fast_recv(take, _SPIN_S, _SPINS)


def _compiled(
    receives: bool,
    channel: Channel,
    kind: MessageKind,
    locked: Callable[[], bool],
    queues: tuple[Sized, ...],
    keys: tuple[Any, ...],
    owner: RingWriter | RingReader,
    nones: tuple[str, ...],
) -> FastPath:
    _, start, _, _ = _entry(kind, channel.ring_bytes)
    words = HEAD, TAIL, PACE, channel.others_state, channel.others_bells, TAKEN, WRITTEN, MODE
    ring = RING, channel.ring_bytes
    wake, announced, pid = partial(owner.peer.wake, channel), owner.queue.announced, owner.peer.card.pid
    return core.Ring(
        receives,
        channel.memory,
        ring,
        words,
        UNIT,
        start,
        locked,
        queues,
        keys,
        owner,
        nones,
        wake,
        announced,
        pid,
        kind.eager_bytes,
        kind.most_bytes,
        kind.is_async,
        ranks_share_cores(),
    )


def _is_aligned(dtype: np.dtype[Any]) -> bool:
    # Whether the ring's units are multiples of an element.
    return UNIT % (dtype.itemsize or UNIT + 1) == 0


def _entry(kind: MessageKind, ring_bytes: int) -> tuple[Header, bytes, int, int]:
    # A message's header, the bytes it begins with, its length in the ring, and the last place from which it is copied
    # in one go (-1 if it is long).
    entry_kind = EAGER if kind.is_eager else RTS
    header, length = Header(entry_kind, kind.tag, kind.num_bytes, kind.dtype_name), entry_bytes(kind.num_bytes)
    return header, kind_of(header), length, ring_bytes - length if kind.num_bytes <= _SHORT_BYTES else -1
