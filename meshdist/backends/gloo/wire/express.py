"""Express: the short way of messages of one kind over the wire, those of few bytes that most programs send.

What they have in common, the header, is packed once; they are read from the one socket that they come over. What is out
of the ordinary takes the long way, through outbox and inbox: something waits for room or for a receipt, another frame
comes first, the end of a peer.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Express
from meshdist.backends.gloo.wire.frames import WHOLE, pack
from meshdist.backends.gloo.wire.waiting import LOOKING_S
from meshdist.waiting import look_for

if TYPE_CHECKING:
    from meshdist.backends.gloo.wire.inbox import WireInbox
    from meshdist.backends.gloo.wire.outbox import WireOutbox

# Header and bytes are joined, and copied once more where they come; longer ones are better off without.
MOST_BYTES = 4 << 10


def express_to(
    outbox: WireOutbox, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes
) -> Express | None:
    """Return what sends messages of a kind; None where they are not of few bytes, or there is no connection yet."""
    bag, lock, connection, dst = outbox.bag, outbox.link.lock, outbox.link.sent_over, outbox.dst
    num_bytes, said = math.prod(shape) * dtype.itemsize, bag.said
    if connection is None or not 0 < num_bytes <= MOST_BYTES:
        return None
    header, send_at_once = pack(WHOLE, outbox.src, bag.token, tag, num_bytes, 0, dtype_name), connection.send_at_once

    def send(array: Array) -> bool:
        if dst in said:
            return False
        with lock:
            return send_at_once(header + array.tobytes())

    return send


def express_from(
    inbox: WireInbox, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes
) -> Express | None:
    """Return what receives messages of a kind, if they come in a moment; None as above, until the rank has sent one."""
    bag, lock, connection = inbox.bag, inbox.link.lock, inbox.link.heard_over
    num_bytes = math.prod(shape) * dtype.itemsize
    if connection is None or not 0 < num_bytes <= MOST_BYTES:
        return None
    header, read_frame = pack(WHOLE, inbox.src, bag.token, tag, num_bytes, 0, dtype_name), connection.read_frame
    matching, unwritten = bag.expected.matching, bag.expected.unwritten

    def take(array: Array) -> bool | None:
        if not lock.acquire(False):
            return False
        try:
            # It is not this one's to take where another receipt may be for it, or another message comes first.
            if unwritten or not matching.is_idle:
                return False
            frame = read_frame(header, num_bytes)
            if frame is None:
                return False
            array[...] = np.frombuffer(frame, dtype).reshape(shape)
        except BlockingIOError:
            return None
        finally:
            lock.release()
        return True

    return lambda array: look_for(partial(take, array), LOOKING_S)
