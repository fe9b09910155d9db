"""A client's connection in the server of a store."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from meshdist.security.handshake import ServerHandshake
from meshdist.store.table import MAX_REQUEST_BYTES, REPLY, REQUEST, Op, Status, pack_fields, unpack_fields

if TYPE_CHECKING:
    from ssl import SSLContext

    from meshdist.security.tls import TlsSocket

PURPOSE = "store"

_READ_BYTES = 1 << 16
_MOST_UNREAD_BYTES = 1 << 12
_OPERATIONS = frozenset(Op)

Request = tuple[Op, float, list[bytes]]


class Session:
    """A client's connection: bytes in, requests out, replies back; never blocks."""

    __slots__ = (
        *("_entry", "_handshake", "_inbox", "_outbox", "_pending", "_secret", "_tls"),
        *("closing", "last_will", "name", "sock"),
    )

    def __init__(self, sock: socket.socket, secret: bytes, name: str, tls: SSLContext | None = None) -> None:
        self.sock = sock
        self._secret = secret
        self._tls = tls
        self._entry: TlsSocket | None = None
        self._pending: Callable[[], int] | None = None
        self.name = name  # the client's address, for the log
        self.closing: str | None = None  # the reason to close it once all replies are sent, or None
        self.last_will: list[bytes] = []  # alternating keys and values, to be set if missing when the connection ends
        self._handshake: ServerHandshake | None = ServerHandshake(secret, PURPOSE)
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()

    @property
    def is_trusted(self) -> bool:
        return self._handshake is None

    @property
    def is_of_meshdist(self) -> bool:
        """True if the client is a process of meshdist, possibly of another job."""
        return self._handshake is None or self._handshake.is_of_meshdist

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def receive(self) -> None:
        """Read what has arrived, up to a limit, since other clients wait; raise OSError if the connection broke."""
        if self._tls is not None and not self._entered():
            return
        self._receive_some()
        # Bytes that TLS has already read from the socket do not wake the selector; they are less than a record.
        while self._pending is not None and self.closing is None and self._pending():
            self._receive_some()

    def _entered(self) -> bool:
        """Advance the TLS handshake; return whether it is over, or the client has to be refused for the lack of one."""
        from meshdist.security.tls import accept_tls, looks_like_tls

        if self._entry is None:
            assert self._tls is not None
            try:
                if not looks_like_tls(self.sock):
                    self._tls = None
                    self._handshake = ServerHandshake(self._secret, PURPOSE, wants_tls=True)
                    return True
            except BlockingIOError:
                return False
            self.sock = self._entry = accept_tls(self.sock, self._tls)
        try:
            if not self._entry.handshake_is_done():
                return False
        except OSError:
            self._entry.drain()
            raise
        self._tls, self._pending = None, self._entry.pending
        return True

    def _receive_some(self) -> None:
        handshake = self._handshake
        try:
            data = self.sock.recv(_READ_BYTES if handshake is None else handshake.wanted)
        except BlockingIOError:
            return
        if not data:
            self.closing = "the client closed the connection"
            self._outbox.clear()
        elif handshake is None:
            self._inbox += data
        else:
            self._send(handshake.feed(data))
            if handshake.trusted:
                self._handshake = None
            elif handshake.refusal is not None:
                self.closing = handshake.refusal
                with suppress(OSError):  # unread data would turn the close into a reset, and the reply be lost
                    self.sock.recv(_MOST_UNREAD_BYTES)

    def requests(self) -> Iterator[Request]:
        """Yield the complete requests; raise ValueError for bytes that are not a request."""
        inbox = self._inbox
        while len(inbox) >= REQUEST.size:
            size, code, timeout_s = REQUEST.unpack_from(inbox)
            if size > MAX_REQUEST_BYTES or code not in _OPERATIONS or not timeout_s >= 0:
                raise ValueError(f"not a request: {size} bytes, operation {code}, {timeout_s} s")
            end = REQUEST.size + size
            if len(inbox) < end:
                return
            with memoryview(inbox) as whole, whole[REQUEST.size : end] as body:
                args = unpack_fields(body)
            del inbox[:end]
            yield Op(code), timeout_s, args

    def reply(self, status: Status, fields: Sequence[bytes] = ()) -> None:
        """Send a reply, or as much of it as possible now; raise OSError if the connection broke."""
        body = pack_fields(fields)
        self._send(REPLY.pack(len(body), status) + body)

    def _send(self, data: bytes) -> None:
        if data:
            self._outbox.append(memoryview(data))
            self.flush()

    def flush(self) -> None:
        """Send as much of the waiting replies as possible now; raise OSError if the connection broke."""
        while self._outbox:
            data = self._outbox[0]
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                return
            if sent < len(data):
                self._outbox[0] = data[sent:]
                return
            self._outbox.popleft()

    def close(self) -> None:
        self._outbox.clear()
        with suppress(OSError):  # gone already; shut down too, since a forked child may hold a copy
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
