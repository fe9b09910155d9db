"""One request to the server of a TCPStore and its reply, over a connection; waits in slices, up to a deadline."""

from __future__ import annotations

import errno
import socket

from meshdist.store.keepalive import SilenceMonitor
from meshdist.store.table import REPLY, Status, unpack_fields
from meshdist.system.deadline import Deadline

_SLICE_S = 0.05  # signals that another thread received, such as Ctrl-C, are handled between two slices
_READ_BYTES = 1 << 16


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
