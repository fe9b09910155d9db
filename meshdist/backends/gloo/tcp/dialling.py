"""Dialler: makes authenticated connections to the listeners of peers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from meshdist.backends.gloo.tcp.acceptor import PURPOSE
from meshdist.backends.gloo.tcp.connection import reset_on_close
from meshdist.errors import DistNetworkError
from meshdist.security.encryption import Encryption
from meshdist.security.handshake import connect_handshake
from meshdist.store.address import endpoint
from meshdist.store.keepalive import tune
from meshdist.system.deadline import Deadline

CONNECT_S = 3.0


class Dialler:
    """Connects in one thread; any other may call `close`, which ends that."""

    def __init__(self, secret: bytes, encryption: Encryption) -> None:
        self._secret = secret
        self._encryption = encryption
        self._sock: socket.socket | None = None
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # the thread is done with it
                sock.shutdown(socket.SHUT_RDWR)

    def dial(
        self,
        host: str,
        port: int,
        claim: Callable[[], bytes],
        handshake_s: float,
        connect_s: float = CONNECT_S,
        then: Callable[[socket.socket, Deadline], None] | None = None,
    ) -> socket.socket:
        """Return a new socket, which does not block.

        Args:
            host: Where the peer listens.
            port: Its port.
            claim: Returns what to claim, once TCP has connected.
            handshake_s: How long the peer's process may take.
            connect_s: How long the peer's host may take.
            then: Is called at the end with the socket, which blocks, and when to give up.

        Raises:
            HandshakeUnanswered: The peer's host has connected, its process does not answer.
            DistNetworkError: The peer is a stranger or refuses.
            OSError: The host or port cannot be reached.
        """
        sock = socket.create_connection((host, port), connect_s)
        try:
            tune(sock)
            self._sock = sock
            if self._is_closed:  # before it could be shut down
                raise DistNetworkError("closed in this process")
            deadline, binding = Deadline(handshake_s), b""
            if self._encryption.covers(sock.getpeername()[0]):
                from meshdist.security.tls import connect_tls

                sock = tls = connect_tls(sock, self._encryption.client, PURPOSE, endpoint(host, port), deadline)
                self._sock, binding = tls, tls.binding()
            connect_handshake(sock, self._secret, PURPOSE, endpoint(host, port), deadline, claim(), binding)
            if then is not None:
                then(sock, deadline)
            sock.setblocking(False)
        except BaseException:
            reset_on_close(sock)  # the peer may have admitted it, and this process goes on
            sock.close()
            raise
        finally:
            self._sock = None
        return sock
