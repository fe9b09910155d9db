"""TcpTransport: the links of one rank with the others of its world.

There is no progress thread: every thread that waits for TCP polls the sockets for all, or sleeps on one descriptor that
stands for all. Only accepting and connecting have threads, so a computing rank does not delay its peers' connections.
"""

from __future__ import annotations

import logging
import socket
import threading
from functools import partial

from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.gloo.tcp.acceptor import Acceptor, Claim
from meshdist.backends.gloo.tcp.connection import Connection, reset_on_close, tune_send_buffer
from meshdist.backends.gloo.tcp.connector import Connector, ListenerRecord, listener_key
from meshdist.backends.gloo.tcp.dialling import Dialler
from meshdist.backends.gloo.tcp.frames import BYE, group_token, pack
from meshdist.backends.gloo.tcp.group_receive_state import GroupReceiveState, LeftGroup
from meshdist.backends.gloo.tcp.link import Link
from meshdist.backends.gloo.tcp.listen_addresses import listen_addresses
from meshdist.backends.gloo.tcp.poller import new_poller
from meshdist.backends.gloo.tcp.resumption import Identity
from meshdist.errors import DistNetworkError
from meshdist.runtime.departure import Departure
from meshdist.runtime.message_counts import Carried
from meshdist.security.encryption import encryption_from_environment
from meshdist.store.tcp import secret_of
from meshdist.system.deadline import Deadline
from meshdist.system.deferring_lock import deferring_lock

_log = logging.getLogger("meshdist")
_DELIVERY_S = 5.0
_PAUSE_S = 0.002
# Of the groups that this rank has destroyed and other ranks may still use, the last ones are remembered. For the others
# the store says that this rank has left.
MOST_LEFT_GROUPS = 1024


class TcpTransport:
    """The links of one rank, from its first group with other hosts on; `fd` is readable when `progress` has work."""

    def __init__(self, options: BackendOptions) -> None:
        peers, store = options.peers, options.world_store
        self.lock = deferring_lock()  # Ctrl-C in the middle of a frame would spoil the connection for all groups
        self._poller = new_poller()
        self.fd = self._poller.fd
        self._peers = peers
        self._store = store
        self.own_rank = options.ranks[options.rank]
        self.own_host = peers.mine.host_name
        self._secret = secret_of(store)
        self._encryption = encryption_from_environment(self._secret)
        self._links: dict[int, Link] = {}
        self._receive_states: dict[int, GroupReceiveState] = {}
        self._left_groups: dict[int, LeftGroup] = {}
        self._connectors: dict[int, Connector] = {}
        self._by_fd: dict[int, Connection] = {}
        self._listeners: dict[int, ListenerRecord] = {}
        self._closing = False
        if self.own_rank == 0 and self._secret and not self._encryption.is_on:
            _log.warning("connections between hosts are not encrypted: %s", self._encryption.mode)
        one_machine = len({card.network for card in peers.cards(range(peers.num_ranks))}) == 1
        addresses = listen_addresses(store, one_machine=one_machine)
        self._has_other_ways = len(addresses) > 1
        self._acceptor = Acceptor(addresses, self._secret, self._encryption, peers.num_ranks, self._take_claim)
        record = ListenerRecord(self._acceptor.token, self._acceptor.endpoints, self._encryption.mode)
        store.set(listener_key(self.own_rank), record.encode())

    def progress(self) -> None:
        with self.lock:
            if self._closing:
                return
            for fd, reads, writes in self._poller.poll():
                connection = self._by_fd.get(fd)
                if connection is None:
                    continue
                if writes:
                    connection.write()
                if reads:
                    connection.read()

    def carried(self) -> dict[int, Carried]:
        """Read what has arrived, and return the bytes exchanged with each rank; see `runtime.message_counts`."""
        self.progress()
        with self.lock:
            found = {rank: link.carried() for rank, link in self._links.items()}
        return {rank: carried for rank, carried in found.items() if any(carried)}

    def link(self, rank: int) -> Link:
        link = self._links.get(rank)
        if link is None:
            process = self._peers.process(rank)
            with self.lock:
                link = self._links.setdefault(rank, Link(self, rank, process))
        return link

    def receive_state(self, token: int) -> GroupReceiveState:
        receive_state = self._receive_states.get(token)
        if receive_state is None:
            with self.lock:
                receive_state = self._receive_states.setdefault(token, GroupReceiveState(token))
        return receive_state

    def open(self, name: str, ranks: tuple[int, ...]) -> GroupReceiveState:
        receive_state = self.receive_state(group_token(name))
        receive_state.ranks = ranks
        return receive_state

    def close_group(self, receive_state: GroupReceiveState, header: bytes, data: bytes) -> None:
        """Send a last frame to a group's ranks, now or when they connect, and discard what arrives for it."""
        with self.lock:
            if receive_state.is_open:
                receive_state.is_open = False
                receive_state.last_words = header, data
                for link in self._links.values():
                    link.discard(receive_state)
                    if link.rank in receive_state.ranks and link.is_connected:
                        link.send_frame(header, data)

    def leave_group(self, receive_state: GroupReceiveState) -> None:
        """Forget what has arrived for a closed group, and with it the group's buffers, which its queue refers to."""
        with self.lock:
            self._receive_states.pop(receive_state.token, None)
            left = LeftGroup(receive_state, self.own_rank)
            if not left.is_over:
                if len(self._left_groups) >= MOST_LEFT_GROUPS:
                    del self._left_groups[next(iter(self._left_groups))]
                self._left_groups[receive_state.token] = left

    def has_left(self, token: int) -> bool:
        return token in self._left_groups

    def note_left(self, token: int, rank: int) -> None:
        """Note that another rank has left a group as well, and will send no more frames for it."""
        left = self._left_groups[token]
        left.leave(rank)
        if left.is_over:
            del self._left_groups[token]

    def last_words(self, rank: int) -> list[tuple[bytes, bytes]]:
        groups: list[LeftGroup | GroupReceiveState] = [*self._left_groups.values(), *self._receive_states.values()]
        return [group.last_words for group in groups if group.last_words is not None and rank in group.ranks]

    def awaits(self, link: Link) -> bool:
        return any(receive_state.awaits(link) for receive_state in list(self._receive_states.values()))

    def links_of(self, receive_state: GroupReceiveState) -> list[Link]:
        return [self._links[rank] for rank in receive_state.ranks if rank in self._links]

    def departure_of(self, rank: int) -> Departure | None:
        return self._peers.departure_of(rank)

    def report_lost(self, rank: int) -> None:
        self._peers.report_end(rank)

    def connect(self, link: Link) -> None:
        if link.rank not in self._connectors and not self._closing:
            connected, gave_up = partial(self._connected, link.rank), partial(self._give_up, link)
            self._connectors[link.rank] = Connector(
                self._store, self._secret, self._encryption, self.own_rank, link.rank, connected, gave_up
            )

    @property
    def is_open(self) -> bool:
        return not self._closing

    def listener(self, rank: int) -> ListenerRecord | None:
        """Return where a rank listens; None if the store is lost."""
        if rank not in self._listeners:
            try:
                self._listeners[rank] = ListenerRecord.decode(self._store.get(listener_key(rank)))
            except DistNetworkError:
                return None
        return self._listeners[rank]

    def dialler(self) -> Dialler:
        return Dialler(self._secret, self._encryption)

    def take_socket(self, connection: Connection, sock: socket.socket, num_received: int) -> None:
        """Have a connection go on over a new socket; the peer has received so many bytes."""
        tune_send_buffer(sock)
        self._register(sock, connection)
        connection.resume_on(sock, partial(self._watch, sock.fileno()), num_received)

    def ring(self) -> None:
        self._poller.ring()

    def close(self) -> None:
        """Say BYE to all peers, wait for delivery, and close the connections."""
        self._acceptor.admit_no_more()
        for connector in list(self._connectors.values()):
            connector.close()
        with self.lock:
            for link in self._links.values():
                link.close(pack(BYE, 0, 0))
        self._deliver(Deadline(_DELIVERY_S))
        self._acceptor.close()
        with self.lock:
            self._closing = True
            for link in self._links.values():
                link.shut()
            started = [resumption for link in self._links.values() for resumption in link.resumptions.stop()]
        for resumption in started:
            resumption.join()
        with self.lock:
            self._poller.close()

    def disown(self) -> None:
        """Close the sockets in a forked child, without a BYE: the parent keeps its own copies."""
        self._closing = True
        self._acceptor.disown()
        for connection in self._by_fd.values():
            connection.sock.close()
        self._poller.close()

    def _deliver(self, deadline: Deadline) -> None:
        """Wait until the peers' kernels have everything: closing a socket earlier may discard it."""
        pause = threading.Event()
        while not deadline.expired():
            self.progress()
            if all(link.all_arrived() for link in list(self._links.values())):
                return
            pause.wait(deadline.slice_s(_PAUSE_S))

    def _take_claim(self, claim: Claim, sock: socket.socket) -> None:
        """Take the socket of a peer that has connected; called by the acceptor's thread."""
        if not claim.attempt:
            self._admit(claim.rank, Identity(claim.name, is_ours=False), sock)
            return
        link = self.link(claim.rank)
        with self.lock:
            if self._closing or not link.resumptions.take(claim, sock):
                reset_on_close(sock)  # the process goes on
                sock.close()
        self.ring()

    def _connected(self, rank: int, name: bytes, sock: socket.socket) -> None:
        self._admit(rank, Identity(name, is_ours=True), sock)

    def _admit(self, rank: int, identity: Identity, sock: socket.socket) -> None:
        link = self.link(rank)
        with self.lock:
            if self._closing:
                reset_on_close(sock)  # the process goes on
                sock.close()
                return
            tune_send_buffer(sock)
            watch = partial(self._watch, sock.fileno())
            connection = Connection(sock, link, watch, link.on_broken, self.lock, has_other_ways=self._has_other_ways)
            self._register(sock, connection)
            link.adopt(connection, identity)
            connection.drain()
        self.ring()

    def _give_up(self, link: Link, why: str) -> None:
        with self.lock:
            link.give_up(why)
        self._poller.ring()

    def _register(self, sock: socket.socket, connection: Connection) -> None:
        self._by_fd[sock.fileno()] = connection
        self._poller.watch(sock.fileno(), True, False)

    def _watch(self, fd: int, reads: bool, writes: bool) -> None:
        if self._by_fd[fd].is_open:
            self._poller.watch(fd, reads, writes)
        else:
            self._poller.forget(fd)
            del self._by_fd[fd]


def tcp_transport(options: BackendOptions) -> TcpTransport:
    transport: TcpTransport = options.peers.once("wire", partial(TcpTransport, options))
    options.peers.carriers["tcp"] = transport
    return transport
