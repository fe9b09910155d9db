"""Caller: connects to one peer, in a thread of its own that ends with it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshdist.backends.gloo.wire.door import PURPOSE, claim
from meshdist.deadline import Deadline
from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.handshake import HANDSHAKE_TIMEOUT_S, connect_handshake
from meshdist.limits import limit_of, start_thread
from meshdist.store import Store
from meshdist.store.address import endpoint, tune

# What a peer that cannot be connected to has to come back.
PATIENCE_S = 10.0

_SLICE_S = 0.5
_CONNECT_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


class Listed(NamedTuple):
    """Where a rank listens for its peers, as the store says.

    Attributes:
        token: What a client must know of the listener.
        endpoints: Host and port of each of its addresses.

    Example:
        >>> listed = Listed(b"12345678", [("127.0.0.1", 4711)])
        >>> Listed.decode(listed.encode()) == listed
        True
    """

    token: bytes
    endpoints: Sequence[tuple[str, int]]

    def encode(self) -> str:
        """Return what stands in the store."""
        return json.dumps([self.token.hex(), self.endpoints])

    @classmethod
    def decode(cls, text: str | bytes) -> Listed:
        """Return what `encode` made `text` of."""
        token, endpoints = json.loads(text)
        return cls(bytes.fromhex(token), [(host, port) for host, port in endpoints])


def listed_key(rank: int) -> str:
    """Return the key of the world's store under which a global rank says where it listens."""
    return f"wire/{rank}"


def first_turn(caller: int, peer: int) -> int:
    """Return the number of the interface, of any that there are, that a pair of ranks begins with.

    Ranks of the same place on two hosts are all equally far apart, so that their sums are all even, or all odd.

    Example:
        >>> [first_turn(rank, rank + 4) % 2 for rank in range(4)]
        [0, 1, 0, 1]
    """
    return (caller + peer) // 2


class Caller:
    """Connects this rank to a peer.

    Args:
        store: The world's store.
        secret: The job's secret, empty where there is none.
        caller, peer: The two global ranks.
        connected: Called with the socket, in the thread.
        gave_up: Called with why the peer cannot be connected to, in the thread.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes,
        caller: int,
        peer: int,
        connected: Callable[[socket.socket], None],
        gave_up: Callable[[str], None],
    ) -> None:
        self._store = store
        self._secret = secret
        self._caller = caller
        self._peer = peer
        self._connected = connected
        self._gave_up = gave_up
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"meshdist-caller-{peer}", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Give up, and wait for the thread."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            listed = self._find()
            if listed is not None:
                self._connect(listed)
        except DistNetworkError as error:
            self._gave_up(str(error))

    def _find(self) -> Listed | None:
        key = listed_key(self._peer)
        while not self._closed.is_set():
            try:
                self._store.wait([key], _SLICE_S)
                return Listed.decode(self._store.get(key))
            except DistNetworkError:
                # The store is gone; those who wait for the peer find out with whom.
                return None
            except DistStoreError:
                continue
        return None

    def _connect(self, listed: Listed) -> None:
        turn, pause_s, since_s = first_turn(self._caller, self._peer), _FIRST_PAUSE_S, time.monotonic()
        while not self._closed.is_set():
            host, port = listed.endpoints[turn % len(listed.endpoints)]
            try:
                sock = self._connect_to(host, port, listed.token)
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

    def _connect_to(self, host: str, port: int, token: bytes) -> socket.socket:
        sock = socket.create_connection((host, port), _CONNECT_S)
        try:
            tune(sock)
            said = claim(token, self._caller)
            deadline = Deadline(HANDSHAKE_TIMEOUT_S)
            connect_handshake(sock, self._secret, PURPOSE, endpoint(host, port), deadline, said)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock
