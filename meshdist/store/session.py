"""A client's connection in the server of a store."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from meshdist.security.admission import Admission
from meshdist.store.table import MAX_REQUEST_BYTES, REPLY, REQUEST, Op, Status, pack_fields, unpack_fields

if TYPE_CHECKING:
    from meshdist.security.tls import TlsContext

PURPOSE = "store"

_READ_BYTES = 1 << 16
_OPERATIONS = frozenset(Op)

Request = tuple[int, Op, float, list[bytes]]


class Session:
    """A client's connection: bytes in, requests out, replies back; never blocks."""

    __slots__ = ("_admission", "_inbox", "_outbox", "_take", "claim", "closing", "name", "sock")

    def __init__(self, sock: socket.socket, secret: bytes, name: str, tls: TlsContext | None = None) -> None:
        self.sock = sock
        self._take: Callable[[int], bytes] | None = None
        self.name = name  # the client's address, for the log
        self.closing: str | None = None  # the reason to close it once all replies are sent, or None
        self.claim = b""  # of a trusted client
        self._admission: Admission | None = Admission(sock, secret, PURPOSE, tls)
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()

    @property
    def is_trusted(self) -> bool:
        return self._admission is None

    @property
    def is_of_meshdist(self) -> bool:
        """True if the client is a process of meshdist, possibly of another job."""
        return self._admission is None or self._admission.is_of_meshdist

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def receive(self) -> None:
        """Read what has arrived, up to a limit, since other clients wait; raise OSError if the connection broke."""
        if self._admission is not None and not self._admitted(self._admission):
            return
        with suppress(BlockingIOError):
            self._add(self.sock.recv(_READ_BYTES))
            # The selector does not report what TLS has already read from the socket.
            while self._take is not None and self.closing is None:
                self._add(self._take(_READ_BYTES))

    def _admitted(self, admission: Admission) -> bool:
        try:
            admission.advance()
        finally:
            self.sock = admission.sock
        if admission.is_trusted:
            self._admission, self.claim = None, admission.claim
            self._take = getattr(self.sock, "take", None)
        self.closing = admission.refusal
        return admission.is_trusted

    def _add(self, data: bytes) -> None:
        if data:
            self._inbox += data
        else:
            self.closing = "the client closed the connection"
            self._outbox.clear()

    def requests(self) -> Iterator[Request]:
        """Yield the complete requests; raise ValueError for bytes that are not a request."""
        inbox = self._inbox
        while len(inbox) >= REQUEST.size:
            size, code, timeout_s, number = REQUEST.unpack_from(inbox)
            if size > MAX_REQUEST_BYTES or code not in _OPERATIONS or not timeout_s >= 0:
                raise ValueError(f"not a request: {size} bytes, operation {code}, {timeout_s} s")
            end = REQUEST.size + size
            if len(inbox) < end:
                return
            with memoryview(inbox) as whole, whole[REQUEST.size : end] as body:
                args = unpack_fields(body)
            del inbox[:end]
            yield number, Op(code), timeout_s, args

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
