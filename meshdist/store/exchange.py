"""One request to the server of a TCPStore and its reply, over a connection; waits in slices, up to a deadline.

The deadline of a request is that of its call, and in a block under `brief` that of the block, if this ends earlier. A
call that fails since a peer cannot be reached leaves a record in the store, which may be behind the same cut. Waiting
until that is noticed as well would double the time until the caller gets the error.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from meshdist.store.keepalive import SilenceMonitor
from meshdist.store.table import REPLY, Status, unpack_fields
from meshdist.system.deadline import Deadline

_SLICE_S = 0.05  # signals that another thread received, such as Ctrl-C, are handled between two slices
_READ_BYTES = 1 << 16

_bound: ContextVar[Deadline | None] = ContextVar("meshdist_store_bound", default=None)
# So that a request can still be sent, which the server carries out without a client that waits.
_LEAST_S = 0.05


def ask(sock: socket.socket, request: bytes, deadline: Deadline, silence: SilenceMonitor) -> tuple[Status, list[bytes]]:
    """Send a request and return its reply; `silence` tells how long the server's host has been silent meanwhile.

    Raises:
        TimeoutError: The deadline has passed; with an errno, the server's host does not answer.
        BrokenPipeError: The server closed the connection in order.
        OSError: The connection broke otherwise.
    """
    _send(sock, request, deadline, silence)
    received = bytearray()
    while len(received) < REPLY.size:
        received += _receive_some(sock, _READ_BYTES, deadline, silence)
    size, status = REPLY.unpack_from(received)
    end = REPLY.size + size
    while len(received) < end:
        received += _receive_some(sock, min(end - len(received), 1 << 20), deadline, silence)
    with memoryview(received) as whole:
        return Status(status), unpack_fields(whole[REPLY.size : end])


def _send(sock: socket.socket, data: bytes, deadline: Deadline, silence: SilenceMonitor) -> None:
    rest = memoryview(data)
    while rest:
        try:
            sock.settimeout(max(deadline.slice_s(_SLICE_S), 1e-3))
            rest = rest[sock.send(rest) :]
        except TimeoutError as error:
            _check_slice(error, deadline, silence)


def _receive_some(sock: socket.socket, most: int, deadline: Deadline, silence: SilenceMonitor) -> bytes:
    while True:
        try:
            sock.settimeout(max(deadline.slice_s(_SLICE_S), 1e-3))
            data = sock.recv(most)
        except TimeoutError as error:
            _check_slice(error, deadline, silence)
        else:
            if not data:
                raise BrokenPipeError(errno.EPIPE, "connection closed")
            return data


def _check_slice(error: TimeoutError, deadline: Deadline, silence: SilenceMonitor) -> None:
    """Raise TimeoutError, with an errno if the connection has ended; else return, to wait for another slice."""
    if error.errno is not None or deadline.expired():
        raise error
    silence.check()


@contextmanager
def brief(timeout_s: float) -> Iterator[None]:
    """Let the calls of a TCPStore in this block take at most `timeout_s` altogether; then they raise DistStoreError."""
    token = _bound.set(Deadline(timeout_s))
    try:
        yield
    finally:
        _bound.reset(token)


def bounded(deadline: Deadline) -> Deadline:
    """Return the deadline of a request, which is that of the block if this ends earlier."""
    bound = _bound.get()
    if bound is None or bound.end_s > deadline.end_s:
        return deadline
    return Deadline(max(bound.remaining_s(), _LEAST_S))
