"""Ranks that know a multicast address only find the one of them that hosts the store, and number themselves there.

Every process says who it is, again and again, so that lost datagrams do no harm, and whom it has heard of late. After a
short while in which nobody says that it hosts a store, the one with the smallest token hosts one and says so. Who hears
of a store goes there. Where two came to host one, as they did not hear each other in time, the one with the larger
token gives up its own. All else is agreed upon in the store (see `automatic_ranks`), behind its handshake: what a
datagram can do is to have a process try to connect.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from meshdist.automatic_ranks import number_ranks
from meshdist.deadline import Deadline
from meshdist.errors import DistNetworkError, DistTimeoutError
from meshdist.handshake import SECRET_VARIABLE, secret_from_environment
from meshdist.init_urls import InitUrl
from meshdist.multicast import Datagram, MulticastSocket
from meshdist.notices import Notice, seal, unseal
from meshdist.peers import host_id
from meshdist.store import Store, TCPStore
from meshdist.store.address import endpoint, is_insecure_allowed

_SETTLE_S = 0.3  # how long to look for a store before hosting one
_PATIENCE_S = 1.0  # how long to leave that to one with a smaller token
_STEP_S = 0.02
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 0.03, 0.3, 0.005
_FORGET_S = 2.0
_CONNECT_S = 3.0
_AVOID_S = 5.0
_LAST_WORDS_S = 0.5
_MOST_PEERS = 4096
_MOST_NAME_CHARACTERS = 1000


class Channel(Protocol):
    """Where notices are sent and received; a MulticastSocket is one."""

    name: str

    def send(self, data: bytes) -> None:
        """Send to everybody."""

    def receive(self, timeout_s: float) -> Datagram | None:
        """Return what came and the host it came from, None if nothing came in time."""


class _OutrankedError(DistNetworkError):
    """This process hosts a store, and so does one with a smaller token."""


@dataclass
class _Peer:
    token: str
    host: str
    port: int
    address: str
    heard_s: float
    answered_s: float = float("-inf")


class Discovery:
    """Looks for the other processes of a job, as one of them.

    Args:
        channel: Where they talk.
        group_name: Tells the job from others that share the channel and the secret.
        secret: The job's secret, empty where there is none.
        this_host_only: Have nothing to do with processes of other hosts.

    Example:
        >>> with MulticastSocket("239.255.77.1", 45672, this_host_only=True) as channel:
        ...     Discovery(channel, "job", b"", this_host_only=True).find(1, Deadline(5.0)) is None
        True
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
        """Return the token of a process that hosts the store; None if this one is to host it.

        Raises:
            DistNetworkError: The channel takes no datagrams.
        """
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
        """Return a new store and tell the others of it from now on.

        Raises:
            DistNetworkError: No port can be listened on.
        """
        local, anywhere = ("::1", "::") if self._is_ipv6 else ("127.0.0.1", "0.0.0.0")
        listen_at = local if self._this_host_only else anywhere
        store = TCPStore(listen_at, 0, is_master=True, timeout=timeout.timeout_s, secret=self._secret)
        self._port, self._due_s = store.port, time.monotonic()
        return store

    def connect(self, token: str, deadline: Deadline) -> TCPStore | None:
        """Return the store that the process `token` hosts, or None if that cannot be reached now."""
        peer = self._peers[token]
        # Processes of one host need no network, and know each other's loopback address.
        address = peer.address if peer.host != self._host else "::1" if self._is_ipv6 else "127.0.0.1"
        try:
            store = TCPStore(address, peer.port, timeout=deadline.slice_s(_CONNECT_S), secret=self._secret)
        except DistNetworkError as error:
            self.avoid(token, f"the store at {endpoint(address, peer.port)} could not be joined: {error}")
            return None
        store.set_timeout(deadline.timeout_s)
        return store

    def avoid(self, token: str, why: str) -> None:
        """Have nothing to do with the store of `token` for a while."""
        self._avoided[token] = time.monotonic() + _AVOID_S
        self._failures[why] = None

    def serve(self) -> None:
        """Answer those who look for the store that this process hosts, for a short time.

        Raises:
            DistNetworkError: Another process that goes first hosts one as well.
        """
        self.step(_STEP_S)
        other = self._hosting()
        if other is not None and other.token < self._token:
            raise _OutrankedError("another process of this job hosts the store already")

    def end_hosting(self) -> None:
        """Tell nobody any more of the store that this process hosted."""
        self._port = 0

    def step(self, longest_s: float) -> None:
        """Say who is here if it is time, and listen."""
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
        self._channel.send(seal(Notice(self._token, self._group_name, self._host, self._port, heard), self._secret))
        self._last_said_s, self._due_s = now_s, now_s + self._pause_s
        self._pause_s = min(1.5 * self._pause_s, _LONGEST_PAUSE_S)

    def _hear(self, data: bytes, address: str) -> None:
        notice = unseal(data, self._secret)
        if notice is None:
            self._ignored["of strangers or jobs with another secret"] += 1
        elif notice.group_name != self._group_name:
            self._ignored[f"of group_name {notice.group_name[:40]!r}"] += 1
        elif self._this_host_only and notice.host != self._host:
            self._ignored["of other hosts"] += 1
        elif notice.token != self._token:
            self._meet(notice, address)

    def _meet(self, notice: Notice, address: str) -> None:
        now_s = time.monotonic()
        before = self._peers.pop(notice.token, None)
        peer = _Peer(notice.token, notice.host, notice.port, address, now_s)
        if self._token in notice.heard:
            peer.answered_s = now_s
        elif before is not None:
            peer.answered_s = before.answered_s
        self._peers[notice.token] = peer  # at the end: the first is the one not heard for the longest time
        if len(self._peers) > _MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        if self._token not in notice.heard:  # it does not know of this one yet, or a datagram was lost
            self._due_s = min(self._due_s, max(now_s, self._last_said_s + _SHORTEST_PAUSE_S))

    def _present(self) -> list[_Peer]:
        """Return who has answered this process of late: what is merely heard may be an echo of the past."""
        now_s = time.monotonic()
        return [peer for peer in self._peers.values() if now_s - peer.answered_s < _FORGET_S]

    def _hosting(self) -> _Peer | None:
        now_s = time.monotonic()
        stores = [peer for peer in self._present() if peer.port and self._avoided.get(peer.token, now_s) <= now_s]
        return min(stores, key=lambda peer: peer.token, default=None)

    def remarks(self) -> str:
        """Return what may explain that somebody was not found, for the end of a message."""
        words = list(self._failures)
        words += [f"datagrams {whose} were ignored ({count})" for whose, count in self._ignored.items()]
        if self._this_host_only:
            words.append(f"without {SECRET_VARIABLE} only processes of this host are looked for")
        return "".join(f"; {word}" for word in words[-5:])


def rendezvous_multicast(url: InitUrl, timeout_s: float) -> tuple[Store, int, int]:
    """Return the store that the ranks share, this process's rank and the world size.

    Raises:
        ValueError: Another process has this rank or says another world size; or all ranks are there already.
        DistNetworkError: The address cannot be used on this host.
        DistTimeoutError: Some ranks did not come; says who did.
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
    """Return the store that all ranks share, and this process's rank.

    Args:
        discovery: Finds the others.
        rank: The rank to have, -1 for any.
        world_size: The number of ranks.
        deadline: When to give up.

    Raises:
        ValueError: Another process has this rank or says another world size; or all ranks are there already.
        DistTimeoutError: Some ranks did not come; says who did.
    """
    while True:
        token = discovery.find(world_size, deadline)
        store = discovery.host(deadline) if token is None else discovery.connect(token, deadline)
        if store is None:
            continue
        try:
            return store, number_ranks(store, rank, world_size, deadline, discovery.serve if token is None else None)
        except DistTimeoutError as error:
            if store.is_master:
                # The others' time ends about now; without the store they could not say who is missing.
                threading.Event().wait(_LAST_WORDS_S)
            store.close()
            raise DistTimeoutError(f"{error}{discovery.remarks()}") from None
        except DistNetworkError as error:
            # The store went away with its host, or makes way for another one: look again.
            store.close()
            discovery.end_hosting()
            if token is not None:
                discovery.avoid(token, str(error))
        except BaseException:
            store.close()
            raise
