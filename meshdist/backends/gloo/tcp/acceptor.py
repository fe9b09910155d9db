"""Acceptor: accepts and authenticates connections from peers, in a thread of its own.

A client must prove within a few seconds that it belongs to the job, by TLS where that is due and by two messages of
fixed size; nothing else is read before. Clients without the secret get no answer and cost the rank's own calls nothing.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from meshdist.backends.gloo.tcp.connection import reset_on_close
from meshdist.errors import DistError, DistNetworkError
from meshdist.security.admission import Admission
from meshdist.security.encryption import Encryption
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S
from meshdist.store.address import listen
from meshdist.store.keepalive import tune
from meshdist.system.platform import limit_of, start_thread

PURPOSE = "rank's wire"
TOKEN_BYTES = 8

_CLAIM = struct.Struct("<8sIIQ8s")
_MOST_CLIENTS = 256
# Pause after accept has failed, for instance for lack of descriptors.
_PAUSE_S = 0.1
_log = logging.getLogger("meshdist")


class Claim(NamedTuple):
    """What a client says of itself and the connection."""

    token: bytes  # of the listener
    rank: int  # of the client, global
    attempt: int  # 0: a new connection; else one that broke is made again, for the so many-th time
    num_received: int  # how many bytes of the connection's frames the client has
    name: bytes  # of the connection

    def pack(self) -> bytes:
        return _CLAIM.pack(*self)


class _Client:
    def __init__(self, admission: Admission, name: str) -> None:
        self.admission = admission
        self.name = name
        self.end_s = time.monotonic() + HANDSHAKE_TIMEOUT_S


class Acceptor:
    """Passes each authenticated peer's claim and socket to `admit`; clients must send the listener's `token`."""

    def __init__(
        self,
        addresses: list[str],
        secret: bytes,
        encryption: Encryption,
        num_ranks: int,
        admit: Callable[[Claim, socket.socket], None],
    ) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self._is_leaving = False
        self._secret = secret
        self._encryption = encryption
        self._num_ranks = num_ranks
        self._admit = admit
        self._clients: dict[int, _Client] = {}  # by descriptor, since TLS replaces the socket
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._ended, self._ender = socket.socketpair()
        try:
            for address in addresses:
                self._listeners.append(_listen_at(address, secret))
            encryption.prepare(str(listener.getsockname()[0]) for listener in self._listeners)
        except BaseException:
            self._close_all()
            raise
        self.endpoints = [listener.getsockname()[:2] for listener in self._listeners]
        for sock in (*self._listeners, self._ended):
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="meshdist-acceptor", daemon=True)
        try:
            start_thread(self._thread)
        except DistError:
            self._close_all()
            raise

    def admit_no_more(self) -> None:
        """Admit connections that are made again alone."""
        self._is_leaving = True

    def close(self) -> None:
        self._ender.send(b"x")
        self._thread.join()
        self._close_all()

    def disown(self) -> None:
        """Close the sockets in a forked child; the thread exists only in the parent."""
        self._close_all()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._select_timeout_s()):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._ended:
                    return
                if sock in self._listeners:
                    self._accept(sock)
                elif key.fd in self._clients:  # not dropped in this round
                    self._advance(self._clients[key.fd])
            now_s = time.monotonic()
            for client in [client for client in self._clients.values() if client.end_s <= now_s]:
                self._drop(client, f"did not prove itself in {HANDSHAKE_TIMEOUT_S:g} s")

    def _select_timeout_s(self) -> float | None:
        if not self._clients:
            return None
        return max(0.0, min(client.end_s for client in self._clients.values()) - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("cannot accept a connection from a peer: %s", error)
            threading.Event().wait(_PAUSE_S)
            return
        if len(self._clients) >= _MOST_CLIENTS:
            # Drop the client that has been waiting longest.
            self._drop(next(iter(self._clients.values())), "made room for others")
        sock.setblocking(False)
        name = str(address[0])
        tls = self._encryption.server if self._encryption.covers(name) else None
        self._clients[sock.fileno()] = _Client(Admission(sock, self._secret, PURPOSE, tls), name)
        self._selector.register(sock, selectors.EVENT_READ)

    def _advance(self, client: _Client) -> None:
        try:
            client.admission.advance()
        except OSError as error:
            self._drop(client, str(error))
            return
        if client.admission.refusal is not None:
            self._drop(client, client.admission.refusal)
        elif self._is_leaving and client.admission.is_of_meshdist and not _claim_of(client).attempt:
            reset_on_close(client.admission.sock)  # the process goes on for now
            self._drop(client, "this rank leaves")
        elif client.admission.is_trusted:
            self._admit_client(client)

    def _admit_client(self, client: _Client) -> None:
        sock = client.admission.sock
        claim = _claim_of(client)
        if claim.token != self.token or claim.rank >= self._num_ranks:
            self._drop(client, "looks for another rank")
            return
        try:
            tune(sock)
        except OSError as error:  # closed by the peer meanwhile
            self._drop(client, str(error))
            return
        self._forget(client)
        self._admit(claim, sock)

    def _drop(self, client: _Client, why: str) -> None:
        _log.info("refused a connection from %s: %s", client.name, why)
        self._forget(client)
        client.admission.sock.close()

    def _forget(self, client: _Client) -> None:
        sock = client.admission.sock
        del self._clients[sock.fileno()]
        self._selector.unregister(sock)

    def _close_all(self) -> None:
        clients = [client.admission.sock for client in self._clients.values()]
        for sock in (*self._listeners, *clients, self._ended, self._ender):
            with suppress(OSError):
                sock.close()
        self._selector.close()


def _claim_of(client: _Client) -> Claim:
    return Claim._make(_CLAIM.unpack(client.admission.claim))


def _listen_at(address: str, secret: bytes) -> socket.socket:
    # `listen` binds other than loopback addresses on all interfaces; a rank listens only where it advertises.
    from meshdist.security.credentials import require_secret
    from meshdist.store.address import endpoint, is_loopback_only, resolve

    try:
        found = resolve(address, 0)
        if is_loopback_only(found):
            return listen(address, 0, secret)
        require_secret(endpoint(address, 0), secret)
        sock = socket.create_server(found[0].sockaddr[:2], family=found[0].family, backlog=1024)
    except OSError as error:
        raise DistNetworkError(f"cannot listen at {address}: {error}{limit_of(error)}") from error
    sock.setblocking(False)
    return sock
