"""Outgoing: a frame on its way to the kernel, and into a connection's `Retention`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

from meshdist.backends.gloo.tcp.retention import Retention

# Up to this size header and bytes are joined, which is faster than passing two buffers to the kernel.
_JOINED_BYTES = 4 << 10
_NOTHING = memoryview(b"")


class Outgoing:
    """Bytes being sent; `on_done` is called when the kernel has them all, by whichever thread writes."""

    __slots__ = ("_data", "_header", "_retention", "_sent", "end", "is_settled", "on_done", "size")

    def __init__(self, header: bytes, data: memoryview, sent: int = 0) -> None:
        self.on_done: Callable[[], None] | None = None
        self.is_settled = False  # nothing here needs `data` any more
        self._header = header
        self._data = data
        self.size = len(header) + len(data)
        self.end = 0
        self._sent = sent
        self._retention: Retention | None = None  # which has this frame, written and not settled

    @property
    def done(self) -> bool:
        """Whether the kernel has all bytes; if so, from then on the memory is the sender's again."""
        retention = self._retention
        if retention is not None:
            with retention.lock:
                if not self.is_settled:
                    retention.settle(self)
        return self.is_settled

    def write(self, sock: socket.socket, retention: Retention) -> bool:
        """Write as much as the kernel takes; return True when all is written; raise OSError if it takes nothing."""
        header, data, sent = self._header, self._data, self._sent
        if len(data) and (sys.platform == "win32" or len(data) <= _JOINED_BYTES):
            self._header, self._data = header, data = b"".join((header, data)), _NOTHING
        size = len(header)
        if not len(data):
            sent += sock.send(memoryview(header)[sent:] if sent else header)
        elif sent >= size:
            sent += sock.send(data[sent - size :])
        elif sys.platform != "win32":
            sent += sock.sendmsg([memoryview(header)[sent:], data])
        self._sent = sent
        if sent < self.size:
            return False
        self._sent = 0
        self._give(retention)
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done()
        return True

    def rewind(self, sent: int) -> None:
        """Send again what is behind the first `sent` bytes."""
        self._sent = sent

    @property
    def sent(self) -> int:
        return self._sent

    def last_bytes(self, count: int) -> bytes:
        num_data = len(self._data)
        if count <= num_data:
            return bytes(self._data[num_data - count :])
        return self._header[len(self._header) - (count - num_data) :] + bytes(self._data)

    def release(self) -> None:
        self._retention, self.is_settled = None, True

    def _give(self, retention: Retention) -> None:
        if len(self._data):
            self._retention = retention
            retention.keep_long(self)
        else:
            retention.keep(self._header)
            self.is_settled = True


class Repetition(Outgoing):
    """What is sent again, and is kept already."""

    __slots__ = ()

    def _give(self, retention: Retention) -> None:
        self.is_settled = True
