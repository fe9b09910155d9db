"""The rendezvous of ranks that only know a multicast address: find the process that hosts the store, or host it.

Every process repeatedly sends a beacon with its token and the tokens it has heard recently, so that lost datagrams do
no harm. If no process announces a store for a short time, the one with the smallest token hosts one and announces it;
the others connect to it. If two host one, because they did not hear each other in time, the one with the larger token
gives up its own. Everything else is agreed in the store (see `rank_assignment`), behind its handshake: a datagram can
only make a process try to connect.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshdist.bootstrap.multicast_socket import Datagram, MulticastSocket
from meshdist.bootstrap.rank_assignment import number_ranks
from meshdist.bootstrap.url import InitUrl
from meshdist.errors import DistNetworkError, DistTimeoutError
from meshdist.runtime.host_identity import host_id
from meshdist.security.credentials import SECRET_VARIABLE, is_insecure_allowed, secret_from_environment
from meshdist.store import Store, TCPStore
from meshdist.store.address import endpoint
from meshdist.system.deadline import Deadline

_SETTLE_S = 0.3  # time to look for a store before hosting one
_PATIENCE_S = 1.0  # time to leave that to a process with a smaller token
_STEP_S = 0.02
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 0.03, 0.3, 0.005
_FORGET_S = 2.0
_CONNECT_S = 3.0
_AVOID_S = 5.0
_LAST_WORDS_S = 0.5
_MOST_PEERS = 4096
_MOST_NAME_CHARACTERS = 1000


class Channel(Protocol):
    """Sends and receives beacons; a MulticastSocket is one."""

    name: str

    def send(self, data: bytes) -> None:
        """Send to everybody."""

    def receive(self, timeout_s: float) -> Datagram | None:
        """Return a datagram and the host it came from, None if none came in time."""


class _OutrankedError(DistNetworkError):
    """A process with a smaller token hosts a store too."""


@dataclass
class _Peer:
    token: str
    host: str
    port: int
    address: str
    heard_s: float
    answered_s: float = float("-inf")


class Discovery:
    """Finds the other processes of a job; those on other hosts are ignored with `this_host_only`.

    `group_name` distinguishes the job from others with the same channel and secret; `secret` is empty if there is none.
    """

    def __init__(self, channel: Channel, group_name: str, secret: bytes, this_host_only: bool) -> None:
        self._channel = channel
        self._group_name = group_name
        self._secret = secret
        self._this_host_only = this_host_only
        self._is_ipv6 = channel.name.startswith("[")
        self._host = hashlib.sha256(host_id().encode()).hexdigest()[:16]
        self._token = os.urandom(8).hex()
        self._port = 0
        self._peers: dict[str, _Peer] = {}
        self._avoided: dict[str, float] = {}
        self._ignored: Counter[str] = Counter()
        self._failures: dict[str, None] = {}
        self._last_said_s = float("-inf")
        self._due_s = time.monotonic()
        self._pause_s = _FIRST_PAUSE_S

    def find(self, world_size: int, deadline: Deadline) -> str | None:
        """Return the token of the process that hosts the store; None if this one should host it."""
        start_s = time.monotonic()
        while not deadline.expired():
            self.step(deadline.slice_s(_STEP_S))
            hosting = self._hosting()
            if hosting is not None:
                return hosting.token
            age_s, others = time.monotonic() - start_s, [peer.token for peer in self._present()]
            is_first = all(self._token < other for other in others)
            if age_s > _PATIENCE_S or (is_first and (age_s > _SETTLE_S or len(others) >= world_size - 1)):
                break
        return None

    def host(self, timeout: Deadline) -> TCPStore:
        """Return a new store, announced from now on; raise DistNetworkError if no port can be listened on."""
        local, anywhere = ("::1", "::") if self._is_ipv6 else ("127.0.0.1", "0.0.0.0")
        listen_at = local if self._this_host_only else anywhere
        store = TCPStore(listen_at, 0, is_master=True, timeout=timeout.timeout_s, secret=self._secret)
        self._port, self._due_s = store.port, time.monotonic()
        return store

    def connect(self, token: str, deadline: Deadline) -> TCPStore | None:
        """Return the store that the process `token` hosts, None if it cannot be reached now."""
        peer = self._peers[token]
        # Processes of one host use the loopback address.
        address = peer.address if peer.host != self._host else "::1" if self._is_ipv6 else "127.0.0.1"
        try:
            store = TCPStore(address, peer.port, timeout=deadline.slice_s(_CONNECT_S), secret=self._secret)
        except DistNetworkError as error:
            self.avoid(token, f"the store at {endpoint(address, peer.port)} could not be joined: {error}")
            return None
        store.set_timeout(deadline.timeout_s)
        return store

    def avoid(self, token: str, why: str) -> None:
        """Ignore the store of `token` for a while."""
        self._avoided[token] = time.monotonic() + _AVOID_S
        self._failures[why] = None

    def serve(self) -> None:
        """Answer processes that look for this process's store, for a short time.

        Raises:
            DistNetworkError: A process with a smaller token hosts a store too.
        """
        self.step(_STEP_S)
        other = self._hosting()
        if other is not None and other.token < self._token:
            raise _OutrankedError("another process of this job hosts the store already")

    def end_hosting(self) -> None:
        self._port = 0

    def step(self, longest_s: float) -> None:
        """Send a beacon if it is time, and receive."""
        deadline = Deadline(longest_s)
        while True:
            now_s = time.monotonic()
            if now_s >= self._due_s:
                self._say(now_s)
            datagram = self._channel.receive(min(deadline.remaining_s(), max(self._due_s - now_s, 0.0)))
            if datagram is not None:
                self._hear(*datagram)
            if deadline.expired():
                return

    def _say(self, now_s: float) -> None:
        recent = [peer for peer in self._peers.values() if now_s - peer.heard_s < _FORGET_S]
        heard = tuple(peer.token for peer in sorted(recent, key=lambda peer: peer.heard_s))
        self._channel.send(sign(Beacon(self._token, self._group_name, self._host, self._port, heard), self._secret))
        self._last_said_s, self._due_s = now_s, now_s + self._pause_s
        self._pause_s = min(1.5 * self._pause_s, _LONGEST_PAUSE_S)

    def _hear(self, data: bytes, address: str) -> None:
        beacon = verify(data, self._secret)
        if beacon is None:
            self._ignored["of strangers or jobs with a different secret"] += 1
        elif beacon.group_name != self._group_name:
            self._ignored[f"of group_name {beacon.group_name[:40]!r}"] += 1
        elif self._this_host_only and beacon.host != self._host:
            self._ignored["of other hosts"] += 1
        elif beacon.token != self._token:
            self._meet(beacon, address)

    def _meet(self, beacon: Beacon, address: str) -> None:
        now_s = time.monotonic()
        before = self._peers.pop(beacon.token, None)
        peer = _Peer(beacon.token, beacon.host, beacon.port, address, now_s)
        if self._token in beacon.heard:
            peer.answered_s = now_s
        elif before is not None:
            peer.answered_s = before.answered_s
        self._peers[beacon.token] = peer  # at the end, so that the first is the one not heard for the longest time
        if len(self._peers) > _MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        if self._token not in beacon.heard:  # it has not heard this process yet, or a datagram was lost
            self._due_s = min(self._due_s, max(now_s, self._last_said_s + _SHORTEST_PAUSE_S))

    def _present(self) -> list[_Peer]:
        """Return the peers that have recently heard this process; a beacon alone may be a replay."""
        now_s = time.monotonic()
        return [peer for peer in self._peers.values() if now_s - peer.answered_s < _FORGET_S]

    def _hosting(self) -> _Peer | None:
        now_s = time.monotonic()
        stores = [peer for peer in self._present() if peer.port and self._avoided.get(peer.token, now_s) <= now_s]
        return min(stores, key=lambda peer: peer.token, default=None)

    def remarks(self) -> str:
        """Return possible reasons why a process was not found, for the end of a message."""
        words = list(self._failures)
        words += [f"datagrams {whose} were ignored ({count})" for whose, count in self._ignored.items()]
        if self._this_host_only:
            words.append(f"without {SECRET_VARIABLE} only processes of this host are looked for")
        return "".join(f"; {word}" for word in words[-5:])


def rendezvous_multicast(url: InitUrl, timeout_s: float) -> tuple[Store, int, int]:
    """Return the store that the ranks share, this process's rank and the world size.

    Raises:
        ValueError: The rank is taken, the world sizes differ, or all ranks have already joined.
        DistNetworkError: The address cannot be used on this host.
        DistTimeoutError: Some ranks did not arrive; the message names those that did.
    """
    if len(url.group_name) > _MOST_NAME_CHARACTERS:
        raise ValueError(f"group_name must have at most {_MOST_NAME_CHARACTERS} characters, got {len(url.group_name)}")
    secret = secret_from_environment()
    this_host_only = not secret and not is_insecure_allowed()
    host, port = url.host_and_port()
    with MulticastSocket(host, port, this_host_only) as channel:
        discovery = Discovery(channel, url.group_name, secret, this_host_only)
        store, rank = meet(discovery, url.rank, url.world_size, Deadline(timeout_s))
    return store, rank, url.world_size


def meet(discovery: Discovery, rank: int, world_size: int, deadline: Deadline) -> tuple[TCPStore, int]:
    """Return the store that all ranks share, and this process's rank: the requested one, or any if that is -1."""
    while True:
        token = discovery.find(world_size, deadline)
        store = discovery.host(deadline) if token is None else discovery.connect(token, deadline)
        if store is None:
            continue
        try:
            return store, number_ranks(store, rank, world_size, deadline, discovery.serve if token is None else None)
        except DistTimeoutError as error:
            if store.is_master:
                # The other ranks time out about now, and need the store to find out who is missing.
                threading.Event().wait(_LAST_WORDS_S)
            store.close()
            raise DistTimeoutError(f"{error}{discovery.remarks()}") from None
        except DistNetworkError as error:
            # The store ended with its host, or another store replaces it: look again.
            store.close()
            discovery.end_hosting()
            if token is not None:
                discovery.avoid(token, str(error))
        except BaseException:
            store.close()
            raise


_MAGIC = b"meshdist notice 1\n"
_SEAL_BYTES = 32
_MOST_HEARD = 256
_TOKEN_CHARACTERS = 16
_MOST_CHARACTERS = 4096


class Beacon(NamedTuple):
    token: str  # identifies the sender, 16 hexadecimal digits
    group_name: str  # the sender's job, among those with the same address and secret
    host: str  # equal for processes of one host
    port: int  # the port of the store that it hosts; 0 for none
    heard: tuple[str, ...]  # the tokens heard recently; a process that finds its own knows that the beacon is no replay


def sign(beacon: Beacon, secret: bytes) -> bytes:
    """Return `beacon` as a datagram signed with `secret`."""
    body = json.dumps(beacon._replace(heard=beacon.heard[-_MOST_HEARD:])).encode()
    return _MAGIC + _signature_of(body, secret) + body


def verify(data: bytes, secret: bytes) -> Beacon | None:
    """Return the beacon in a datagram; None if its signature is wrong or it is damaged."""
    import hmac

    start = len(_MAGIC) + _SEAL_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC) or not hmac.compare_digest(data[len(_MAGIC) : start], _signature_of(body, secret)):
        return None
    # Without a secret any process can sign, so check the content as well.
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return _checked(fields)


def _checked(fields: object) -> Beacon | None:
    if not isinstance(fields, list) or len(fields) != len(Beacon._fields):
        return None
    token, group_name, host, port, heard = fields
    if not (isinstance(port, int) and 0 <= port <= 65535 and isinstance(heard, list) and len(heard) <= _MOST_HEARD):
        return None
    if not all(isinstance(text, str) and len(text) <= _MOST_CHARACTERS for text in (group_name, host)):
        return None
    if not all(isinstance(text, str) and len(text) == _TOKEN_CHARACTERS for text in (token, *heard)):
        return None
    return Beacon(token, group_name, host, int(port), tuple(heard))


def _signature_of(body: bytes, secret: bytes) -> bytes:
    import hmac  # 3 ms; only processes that send beacons need it

    return hmac.digest(secret, _MAGIC + body, "sha256")
