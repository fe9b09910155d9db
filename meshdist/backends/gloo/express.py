"""Express: the short way of messages of one kind, those of few bytes that most programs send.

All that messages of a tag, dtype and shape to, or from, one rank have in common is found out once. What is out of the
ordinary takes the long way, through outbox and inbox: the ring is full or there are messages waiting before this one,
a receipt or a message without a partner, the end of a peer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array, as_bytes
from meshdist.backends.base import Express
from meshdist.backends.gloo.channel import (
    FIRST_PIECE,
    HEAD,
    RING,
    RING_BYTES,
    TAIL,
    UNIT,
    WHOLE,
    Header,
    entry_bytes,
    kind_of,
)
from meshdist.waiting import look_for

if TYPE_CHECKING:
    from meshdist.backends.gloo.inbox import Inbox
    from meshdist.backends.gloo.outbox import Outbox

# Up to here a message is copied in one go, else in pieces, as on the long way.
_SHORT_BYTES = FIRST_PIECE
# How often a receiver looks, and then how long, letting others run, before it posts a receipt, which a peer that comes
# late needs.
_LOOKS, _LOOKING_S = 60, 0.0002


def express_to(
    outbox: Outbox, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes
) -> Express | None:
    """Return what sends messages of a kind; None where there is nothing."""
    if not _is_aligned(dtype):
        return None
    channel, wake = outbox.channel, outbox.peer.wake
    words, memory, ring = channel.words, channel.memory, channel.ring_of(dtype)
    lock, waiting = outbox.lock, outbox.waiting
    others_state, others_bells = channel.others_state, channel.others_bells
    itemsize, count, is_flat = dtype.itemsize, math.prod(shape), len(shape) == 1
    header = Header(WHOLE, tag, count * itemsize, dtype_name)
    kind, length, last = _entry(header)
    kind_bytes = len(kind)

    def send(array: Array) -> bool:
        with lock:
            head = words[HEAD]
            if waiting or words[others_state] or head + length - words[TAIL] > RING_BYTES:
                return False
            place = head % RING_BYTES
            if place <= last:
                begin = place + RING
                memory[begin : begin + kind_bytes] = kind
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


def express_from(
    inbox: Inbox, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes
) -> Express | None:
    """Return what receives messages of a kind, if they come in a moment; None from a rank that was never heard of."""
    channel, wake, moving, matching = inbox.channel, inbox.peer.wake, inbox.moving, inbox.expected.matching
    if channel is None or not _is_aligned(dtype):
        return None
    words, memory, ring = channel.words, channel.memory, channel.ring_of(dtype)
    others_bells = channel.others_bells
    itemsize, count, is_flat = dtype.itemsize, math.prod(shape), len(shape) == 1
    kind, length, last = _entry(Header(WHOLE, tag, count * itemsize, dtype_name))
    kind_bytes = len(kind)

    def receive(array: Array) -> bool:
        tail = words[TAIL]
        if not look_for(lambda: True if words[HEAD] != tail else None, _LOOKING_S, _LOOKS):
            return False
        if not moving.acquire(False):
            return False
        try:
            tail = words[TAIL]
            place = tail % RING_BYTES
            begin = place + RING
            if words[HEAD] == tail or memory[begin : begin + kind_bytes] != kind:
                return False
            # Nor is it this one's to take where it has been begun, or another receipt may be for it.
            if inbox.coming is not None or inbox.left_over is not None or not matching.is_idle:
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

    return receive


def _is_aligned(dtype: np.dtype[Any]) -> bool:
    # Whether elements of it lie where the ring has such.
    return UNIT % (dtype.itemsize or UNIT + 1) == 0


def _entry(header: Header) -> tuple[bytes, int, int]:
    # How a message lies in the ring: what it begins with, its bytes, and the last place from which it is copied in one
    # go (none where it is long).
    length = entry_bytes(header.num_bytes)
    return kind_of(header), length, RING_BYTES - length if header.num_bytes <= _SHORT_BYTES else -1
