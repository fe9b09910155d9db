"""Connector: connects to one peer, in a thread of its own."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshdist.backends.gloo.tcp.acceptor import Claim
from meshdist.backends.gloo.tcp.dialling import Dialler
from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.security.credentials import SET_ALIKE
from meshdist.security.encryption import Encryption
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeUnanswered
from meshdist.store import Store
from meshdist.store.address import endpoint
from meshdist.system.platform import limit_of, start_thread

# How long a peer may be unreachable.
PATIENCE_S = 10.0
# A peer that holds the interpreter's lock or is stopped does not answer. Its kernel takes the connections, as many as
# its backlog has room for: so each attempt lasts longer than the one before.
_LONGEST_HANDSHAKE_S = 60.0

_SLICE_S = 0.5
NAME_BYTES = 8
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
    """Connects rank `caller` to `peer`, both global.

    The thread calls `connected`, with the name of the connection, or `gave_up`, with the reason.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes,
        encryption: Encryption,
        caller: int,
        peer: int,
        connected: Callable[[bytes, socket.socket], None],
        gave_up: Callable[[str], None],
    ) -> None:
        self._store = store
        self._encryption = encryption
        self._caller = caller
        self._peer = peer
        self._connected = connected
        self._gave_up = gave_up
        self._closed = threading.Event()
        self._name = os.urandom(NAME_BYTES)
        self._dialler = Dialler(secret, encryption)
        self._thread = threading.Thread(target=self._run, name=f"meshdist-connector-{peer}", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        self._closed.set()
        self._dialler.close()
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
        said = Claim(listener.token, self._caller, 0, 0, self._name).pack()
        while not self._closed.is_set():
            host, port = listener.endpoints[turn % len(listener.endpoints)]
            try:
                sock = self._dialler.dial(host, port, lambda: said, handshake_s)
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
            self._connected(self._name, sock)
            return
