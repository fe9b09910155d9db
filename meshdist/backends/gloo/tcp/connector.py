"""Connector: connects to one peer, in a thread of its own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from meshdist.backends.gloo.tcp.acceptor import PURPOSE, pack_claim
from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.security.credentials import SET_ALIKE
from meshdist.security.encryption import Encryption
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeUnanswered, connect_handshake
from meshdist.store import Store
from meshdist.store.address import endpoint
from meshdist.store.keepalive import tune
from meshdist.system.deadline import Deadline
from meshdist.system.platform import limit_of, start_thread

# How long a peer may be unreachable.
PATIENCE_S = 10.0
# A peer that holds the interpreter's lock or is stopped does not answer. Its kernel takes the connections, as many as
# its backlog has room for: so each attempt lasts longer than the one before.
_LONGEST_HANDSHAKE_S = 60.0

_SLICE_S = 0.5
_CONNECT_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


class ListenerRecord(NamedTuple):
    """Where a rank listens, as published in the store."""

    token: bytes  # of the listener
    endpoints: Sequence[tuple[str, int]]  # host and port of each address
    encryption: str  # `Encryption.mode`

    def encode(self) -> str:
        return json.dumps([self.token.hex(), self.endpoints, self.encryption])

    @classmethod
    def decode(cls, text: str | bytes) -> ListenerRecord:
        token, endpoints, encryption = json.loads(text)
        return cls(bytes.fromhex(token), [(host, port) for host, port in endpoints], encryption)


def listener_key(rank: int) -> str:
    return f"wire/{rank}"


def first_interface(caller: int, peer: int) -> int:
    """Return the index of the interface (modulo their number) that a pair of ranks tries first.

    Ranks of equal place on two hosts have equal distances, so their sums are all even or all odd; halving them spreads
    the pairs over the interfaces.
    """
    return (caller + peer) // 2


class Connector:
    """Connects rank `caller` to `peer`, both global; the thread calls `connected` or `gave_up`, with the reason."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        encryption: Encryption,
        caller: int,
        peer: int,
        connected: Callable[[socket.socket], None],
        gave_up: Callable[[str], None],
    ) -> None:
        self._store = store
        self._secret = secret
        self._encryption = encryption
        self._caller = caller
        self._peer = peer
        self._connected = connected
        self._gave_up = gave_up
        self._closed = threading.Event()
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=f"meshdist-connector-{peer}", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        self._closed.set()
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # the thread is done with it
                sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            listener = self._find()
            if listener is not None:
                self._connect(listener)
        except DistNetworkError as error:
            self._gave_up(str(error))

    def _find(self) -> ListenerRecord | None:
        key = listener_key(self._peer)
        while not self._closed.is_set():
            try:
                self._store.wait([key], _SLICE_S)
                return ListenerRecord.decode(self._store.get(key))
            except DistNetworkError:
                # The store is lost; the waits for the peer report with which rank.
                return None
            except DistStoreError:
                continue
        return None

    def _connect(self, listener: ListenerRecord) -> None:
        if listener.encryption != self._encryption.mode:
            raise DistNetworkError(
                f"its connections are encrypted by {listener.encryption}, those of this process by"
                f" {self._encryption.mode}: {SET_ALIKE}"
            )
        turn, pause_s, since_s = first_interface(self._caller, self._peer), _FIRST_PAUSE_S, time.monotonic()
        handshake_s = HANDSHAKE_TIMEOUT_S
        while not self._closed.is_set():
            host, port = listener.endpoints[turn % len(listener.endpoints)]
            try:
                sock = self._connect_to(host, port, listener.token, handshake_s)
            except HandshakeUnanswered:
                turn, since_s = turn + 1, time.monotonic()
                handshake_s = min(2 * handshake_s, _LONGEST_HANDSHAKE_S)
                continue
            except (OSError, DistNetworkError) as error:
                if time.monotonic() - since_s > PATIENCE_S:
                    raise DistNetworkError(
                        f"no connection to {endpoint(host, port)}: {error}{limit_of(error)}"
                    ) from None
                self._closed.wait(pause_s)
                turn, pause_s = turn + 1, min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            self._connected(sock)
            return

    def _connect_to(self, host: str, port: int, token: bytes, handshake_s: float) -> socket.socket:
        sock = socket.create_connection((host, port), _CONNECT_S)
        try:
            tune(sock)
            said = pack_claim(token, self._caller)
            self._sock = sock
            if self._closed.is_set():  # before it could be shut down
                raise DistNetworkError("closed in this process")
            deadline, binding = Deadline(handshake_s), b""
            if self._encryption.covers(sock.getpeername()[0]):
                from meshdist.security.tls import connect_tls

                sock = tls = connect_tls(sock, self._encryption.client, PURPOSE, endpoint(host, port), deadline)
                self._sock, binding = tls, tls.binding()
            connect_handshake(sock, self._secret, PURPOSE, endpoint(host, port), deadline, said, binding)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        finally:
            self._sock = None
        return sock
