"""Acceptor: accepts and authenticates connections from peers, in a thread of its own.

A client must prove within a few seconds, with two messages of fixed size, that it belongs to the job; nothing else is
read before. Clients without the secret get no answer and cost the rank's own calls nothing.
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

from meshdist.errors import DistError, DistNetworkError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, ServerHandshake
from meshdist.store.address import listen
from meshdist.store.keepalive import tune
from meshdist.system.platform import limit_of, start_thread

PURPOSE = "rank's wire"
TOKEN_BYTES = 8

# The token of the listener, and the global rank of the client.
_CLAIM = struct.Struct("<8sI")
_MOST_CLIENTS = 256
# Pause after accept has failed, for instance for lack of descriptors.
_PAUSE_S = 0.1
_log = logging.getLogger("meshdist")


def pack_claim(token: bytes, rank: int) -> bytes:
    return _CLAIM.pack(token, rank)


class _Client:
    def __init__(self, sock: socket.socket, name: str, secret: bytes) -> None:
        self.sock = sock
        self.name = name
        self.handshake = ServerHandshake(secret, PURPOSE)
        self.end_s = time.monotonic() + HANDSHAKE_TIMEOUT_S


class Acceptor:
    """Passes each authenticated peer's global rank and socket to `admit`; clients must send the listener's `token`."""

    def __init__(
        self, addresses: list[str], secret: bytes, num_ranks: int, admit: Callable[[int, socket.socket], None]
    ) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self._secret = secret
        self._num_ranks = num_ranks
        self._admit = admit
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._ended, self._ender = socket.socketpair()
        try:
            for address in addresses:
                self._listeners.append(_listen_at(address, secret))
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
                client = self._clients.get(sock)
                if client is None:
                    self._accept(sock)
                else:
                    self._read_handshake(client)
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
        client = self._clients[sock] = _Client(sock, str(address[0]), self._secret)
        self._selector.register(client.sock, selectors.EVENT_READ)

    def _read_handshake(self, client: _Client) -> None:
        handshake = client.handshake
        try:
            data = client.sock.recv(handshake.wanted)
            # The socket buffer of a new connection always has room for so few bytes.
            client.sock.send(handshake.feed(data)) if data else None
        except OSError as error:
            self._drop(client, str(error))
            return
        if not data:
            self._drop(client, "closed the connection")
        elif handshake.refusal is not None:
            self._drop(client, handshake.refusal)
        elif handshake.trusted:
            self._admit_client(client)

    def _admit_client(self, client: _Client) -> None:
        token, rank = _CLAIM.unpack_from(client.handshake.claim)
        if token != self.token or rank >= self._num_ranks:
            self._drop(client, "looks for another rank")
            return
        try:
            tune(client.sock)
        except OSError as error:  # closed by the peer meanwhile
            self._drop(client, str(error))
            return
        self._selector.unregister(client.sock)
        del self._clients[client.sock]
        self._admit(rank, client.sock)

    def _drop(self, client: _Client, why: str) -> None:
        _log.info("refused a connection from %s: %s", client.name, why)
        del self._clients[client.sock]
        self._selector.unregister(client.sock)
        client.sock.close()

    def _close_all(self) -> None:
        for sock in (*self._listeners, *self._clients, self._ended, self._ender):
            with suppress(OSError):
                sock.close()
        self._selector.close()


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
