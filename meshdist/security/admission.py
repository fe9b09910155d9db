"""Admission: the server's side of a new connection, until its client has proven that it belongs to the job."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from meshdist.security.credentials import SECRET_VARIABLE, OtherSecretAlert, OtherSecretError
from meshdist.security.handshake import ServerHandshake

if TYPE_CHECKING:
    from meshdist.security.tls import TlsContext, TlsSocket

_MOST_UNREAD_BYTES = 1 << 12


class Admission:
    """TLS if `tls` is given, then the handshake with the secret; never blocks.

    Call `advance` when `sock` is readable, until `is_trusted` or `refusal` says how it ended. A client without TLS
    where it is due is told so and refused.
    """

    __slots__ = (
        *("_entry", "_handshake", "_has_other_certificate", "_is_ready", "_purpose", "_secret", "_tls"),
        *("refusal", "sock"),
    )

    def __init__(self, sock: socket.socket, secret: bytes, purpose: str, tls: TlsContext | None = None) -> None:
        self.sock = sock  # replaced when TLS begins
        self.refusal: str | None = None  # why the client must be dropped; it has been told
        self._secret = secret
        self._purpose = purpose
        self._tls = tls
        self._entry: TlsSocket | None = None
        self._has_other_certificate = False
        self._is_ready = tls is None  # for the handshake with the secret
        self._handshake = ServerHandshake(secret, purpose)

    @property
    def is_trusted(self) -> bool:
        return self._handshake.trusted

    @property
    def claim(self) -> bytes:
        """What the client says of itself, proven; see `connect_handshake`."""
        return self._handshake.claim

    @property
    def is_of_meshdist(self) -> bool:
        """True once the client has shown to be a process of meshdist, possibly of another job."""
        return self._has_other_certificate or self._handshake.is_of_meshdist

    def advance(self) -> None:
        """Read what has arrived, and answer.

        Raises:
            TlsError: The client's TLS or its certificate is refused.
            OSError: The connection broke, or the client closed it.
        """
        try:
            if not self._is_ready and not self._begin_tls():
                return
        except (OtherSecretError, OtherSecretAlert):
            self._has_other_certificate = True
            self.refusal = f"belongs to another job: it has another {SECRET_VARIABLE}"
            return
        with suppress(BlockingIOError):
            while self.refusal is None and not self.is_trusted:
                self._read(self.sock.recv(self._handshake.wanted))

    def _begin_tls(self) -> bool:
        """Advance the TLS handshake; return whether it is over, or the client has to be refused for the lack of one."""
        from meshdist.security.tls import TlsSocket, looks_like_tls

        if self._entry is None:
            assert self._tls is not None
            try:
                if not looks_like_tls(self.sock):
                    self._handshake = ServerHandshake(self._secret, self._purpose, wants_tls=True)
                    self._is_ready = True
                    return True
            except BlockingIOError:
                return False
            self.sock = self._entry = TlsSocket(self.sock, self._tls, is_server=True)
        try:
            self._is_ready = self._entry.handshake_is_done()
        except OSError:
            self._entry.drain()
            raise
        if self._is_ready:
            self._handshake = ServerHandshake(self._secret, self._purpose, binding=self._entry.binding())
        return self._is_ready

    def _read(self, data: bytes) -> None:
        if not data:
            # A client that has waited too long, and comes again: nobody refused it.
            raise ConnectionAbortedError("the client closed the connection")
        reply = self._handshake.feed(data)
        if reply:
            self.sock.send(reply)  # the buffer of a new connection always has room for so few bytes
        self.refusal = self._handshake.refusal
        if self.refusal is not None:
            with suppress(OSError):  # unread data would turn the close into a reset, and the reply be lost
                self.sock.recv(_MOST_UNREAD_BYTES)
