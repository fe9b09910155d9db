"""The fast path of small messages over TCP; see `backends.p2p.eager_messages`.

The header is packed once, and messages are read directly from the socket. A request is used instead if a send waits for
room, a receive is posted, a message is unexpected, another frame comes first, or the peer has left.
"""

from __future__ import annotations

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.base import FastPath
from meshdist.backends.gloo.tcp.frames import EAGER, pack
from meshdist.backends.gloo.tcp.group_receive_state import GroupReceiveState
from meshdist.backends.gloo.tcp.link import Link
from meshdist.backends.gloo.tcp.waits import SPIN_S
from meshdist.backends.p2p.eager_messages import MessageKind, fast_recv

# Header and bytes are joined for sending, and copied once more on arrival; longer messages are faster without.
MOST_BYTES = 4 << 10


def tcp_fast_send(link: Link, state: GroupReceiveState, src: int, dst: int, kind: MessageKind) -> FastPath | None:
    """Return a function that sends messages of a kind; None if they are too long or there is no connection yet."""
    lock, connection, departures = link.lock, link.send_connection, state.departures
    if connection is None or not 0 < kind.num_bytes <= MOST_BYTES:
        return None
    header = pack(EAGER, src, state.token, kind.tag, kind.num_bytes, 0, kind.dtype_name)
    send_at_once = connection.send_at_once

    def send(array: Array) -> bool:
        if dst in departures:
            return False
        with lock:
            return send_at_once(header + array.tobytes())

    return send


def tcp_fast_recv(link: Link, state: GroupReceiveState, src: int, kind: MessageKind) -> FastPath | None:
    """Return a function that receives messages of a kind; None if they are too long or none has arrived yet."""
    lock, connection, queue = link.lock, link.recv_connection, state.queue
    dtype, shape, num_bytes = kind.dtype, kind.shape, kind.num_bytes
    if connection is None or not 0 < num_bytes <= MOST_BYTES:
        return None
    header = pack(EAGER, src, state.token, kind.tag, num_bytes, 0, kind.dtype_name)
    read_frame, pending = connection.read_frame, queue.pending

    def take(array: Array) -> bool | None:
        if not lock.acquire(False):
            return False
        try:
            if pending or not queue.is_idle:
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

    return fast_recv(take, SPIN_S)
