"""Wire: the links of one rank with the others of its world, and what moves them on.

Nothing moves by itself: whoever waits for something of the wire looks what the sockets have, for all; who sleeps does
so on one descriptor that stands for all of them. Only who comes in, and connections that are about to be made, have
threads, so that a rank that computes does not keep its peers from connecting.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from meshdist.backends.gloo.wire.bag import Bag
from meshdist.backends.gloo.wire.caller import Caller, Listed, listed_key
from meshdist.backends.gloo.wire.connection import Connection
from meshdist.backends.gloo.wire.door import Door
from meshdist.backends.gloo.wire.frames import BYE, group_token, pack
from meshdist.backends.gloo.wire.interfaces import listen_addresses
from meshdist.backends.gloo.wire.link import Link
from meshdist.backends.gloo.wire.pacing import pace
from meshdist.backends.gloo.wire.poller import new_poller
from meshdist.deadline import Deadline
from meshdist.errors import DistError
from meshdist.handshake import secret_from_environment

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

_DELIVERY_S = 5.0
_PAUSE_S = 0.002


class Wire:
    """The links of one rank. Made with its first group that has ranks on other hosts, closed with the world.

    Args:
        options: Of a group of the world.

    Attributes:
        lock: Held by whoever moves the wire on.
        fd: A descriptor that can be read when something has come, or can go.

    Raises:
        DistNetworkError: There is no address to listen at.
        DistBackendError: This system has no epoll.
    """

    def __init__(self, options: BackendOptions) -> None:
        peers, store = options.peers, options.world_store
        self.lock = threading.RLock()
        self._poller = new_poller()
        self.fd = self._poller.fd
        self._peers = peers
        self._store = store
        self._rank = options.ranks[options.rank]
        self._secret = secret_from_environment()
        self._links: dict[int, Link] = {}
        self._bags: dict[int, Bag] = {}
        self._callers: dict[int, Caller] = {}
        self._by_fd: dict[int, Connection] = {}
        self._closing = False
        one_machine = len({card.network for card in peers.cards(range(peers.num_ranks))}) == 1
        addresses = listen_addresses(store, one_machine=one_machine)
        self._door = Door(addresses, self._secret, peers.num_ranks, self._admit)
        store.set(listed_key(self._rank), Listed(self._door.token, self._door.endpoints).encode())

    def drive(self) -> None:
        """Move on what can be moved."""
        with self.lock:
            if self._closing:
                return
            for fd, reads, writes in self._poller.look():
                connection = self._by_fd.get(fd)
                if connection is None:
                    continue
                if writes:
                    connection.write()
                if reads:
                    connection.read()

    def link(self, rank: int) -> Link:
        """Return the link with a global rank."""
        link = self._links.get(rank)
        if link is None:
            process = self._peers.process(rank)
            with self.lock:
                link = self._links.setdefault(rank, Link(self, rank, process))
        return link

    def bag(self, token: int) -> Bag:
        """Return what has come for a group."""
        bag = self._bags.get(token)
        if bag is None:
            with self.lock:
                bag = self._bags.setdefault(token, Bag(token))
        return bag

    def open(self, name: str, ranks: tuple[int, ...]) -> Bag:
        """Return what has come for a group that this rank uses from now on."""
        bag = self.bag(group_token(name))
        bag.ranks = ranks
        return bag

    def shut(self, bag: Bag, header: bytes, data: bytes) -> None:
        """Say last words to the ranks of a group, and throw away what comes for it from now on.

        Its arrays are no longer the wire's. Ranks that connect later are told then.
        """
        with self.lock:
            if bag.is_open:
                bag.is_open = False
                bag.last_words = header, data
                for link in self._links.values():
                    link.divert(bag)
                    if link.rank in bag.ranks and link.is_connected:
                        link.say(header, data)

    def last_words(self, rank: int) -> list[tuple[bytes, bytes]]:
        """Return what was said in groups of a global rank that this one has closed, or given up."""
        return [bag.last_words for bag in self._bags.values() if bag.last_words is not None and rank in bag.ranks]

    def asks(self, link: Link) -> bool:
        """Return whether this rank waits for a message that the peer of `link` may have sent."""
        return any(bag.asks(link) for bag in list(self._bags.values()))

    def links_of(self, bag: Bag) -> list[Link]:
        """Return the links with ranks of a group that there are."""
        return [self._links[rank] for rank in bag.ranks if rank in self._links]

    def farewell_of(self, rank: int) -> str | None:
        """Return what a global rank said in the store as it left the world; None where it has not, or nobody knows."""
        with suppress(DistError):  # the store may be gone as well
            return self._peers.farewell_of(rank)
        return None

    def lost(self, rank: int) -> None:
        """Learn that the process of a global rank has ended without a word."""
        self._peers.report_end(rank)

    def call(self, link: Link) -> None:
        """Connect to the peer of `link`, unless that is under way."""
        if link.rank not in self._callers and not self._closing:
            connected, gave_up = partial(self._admit, link.rank), partial(self._give_up, link)
            self._callers[link.rank] = Caller(self._store, self._secret, self._rank, link.rank, connected, gave_up)

    def close(self) -> None:
        """Let what was sent arrive, take leave of all, and close the connections."""
        for caller in list(self._callers.values()):
            caller.close()
        self._door.close()
        with self.lock:
            for link in self._links.values():
                link.close(pack(BYE, 0, 0))
        self._deliver(Deadline(_DELIVERY_S))
        with self.lock:
            for link in self._links.values():
                link.shut()
            self._closing = True
            self._poller.close()

    def disown(self) -> None:
        """In a process that was forked of the rank: close its sockets, without a word; the rank has its own."""
        self._closing = True
        self._door.disown()
        for connection in self._by_fd.values():
            connection.sock.close()
        self._poller.close()

    def _deliver(self, deadline: Deadline) -> None:
        """Wait until the peers' systems have what was sent: a socket that is closed before may take it back."""
        pause = threading.Event()
        while not deadline.expired():
            self.drive()
            if all(link.all_arrived() for link in list(self._links.values())):
                return
            pause.wait(deadline.slice_s(_PAUSE_S))

    def _admit(self, rank: int, sock: socket.socket) -> None:
        link = self.link(rank)
        with self.lock:
            if self._closing:
                sock.close()
                return
            pace(sock)
            fd = sock.fileno()
            connection = Connection(sock, link, partial(self._watch, fd))
            self._by_fd[fd] = connection
            self._watch(fd, True, False)
            link.adopt(connection)
        self._poller.ring()

    def _give_up(self, link: Link, why: str) -> None:
        with self.lock:
            link.give_up(why)
        self._poller.ring()

    def _watch(self, fd: int, reads: bool, writes: bool) -> None:
        if self._by_fd[fd].ended is None:
            self._poller.watch(fd, reads, writes)
        else:
            self._poller.forget(fd)
            del self._by_fd[fd]


def wire_of(options: BackendOptions) -> Wire:
    """Return the wire of a world, which is made when it is first asked for."""
    wire: Wire = options.peers.once("wire", partial(Wire, options))
    return wire
