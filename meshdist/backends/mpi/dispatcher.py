"""The dispatcher: all point-to-point messages of this process, for all groups.

They use one communicator of all ranks, so that two ranks of a group can communicate without the others. Every packet
begins with a header that names its group. Up to the eager limit the payload follows the header in the same send, from
a copy (EAGER). A longer message is announced (RTS) and sent separately, from the sender's array into the receiver's.
"""

from __future__ import annotations

import atexit
import struct
from collections import Counter, deque
from typing import Any, Protocol

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.mpi.arithmetic import Arithmetic
from meshdist.backends.mpi.library import Requests, Session
from meshdist.backends.p2p.eager_messages import MOST_EAGER_BYTES
from meshdist.runtime.message_counts import Carried
from meshdist.runtime.peer_monitor import Peers

# Token of the group, kind, tag, bytes, number, name of the dtype.
_HEADER = struct.Struct("=Qqqqq16s")
HEADER_BYTES = _HEADER.size
EAGER, RTS, FAILED = 1, 2, 3
_PACKET_TAG, _FIRST_LONG_TAG = 2, 16
# MPI before version 4 has 32-bit counts.
_PIECE_BYTES = 1 << 30
# Limit of copies in flight; beyond it, senders wait.
_MOST_COPIED_BYTES = 16 << 20


def pack_header(token: int, kind: int, tag: int, num_bytes: int, dtype: bytes, number: int = 0) -> bytes:
    return _HEADER.pack(token, kind, tag, num_bytes, number, dtype)


class Packet:
    """A received header and, of an eager message, its bytes."""

    __slots__ = ("data", "dtype", "kind", "num_bytes", "number", "source", "tag")

    def __init__(self, source: int, header: tuple[Any, ...], data: Array) -> None:
        self.source = source
        _, self.kind, self.tag, self.num_bytes, self.number, self.dtype = header
        self.data = data


class Handler(Protocol):
    """Receives the packets of one group."""

    def handle(self, packet: Packet) -> None:
        """Handle a packet; its bytes are valid during the call only."""


class Dispatcher:
    """The messages of this process, over a communicator numbered as MPI.COMM_WORLD."""

    def __init__(self, session: Session, comm: Any) -> None:
        self._session = session
        self._comm = comm
        self._byte = session.mpi.BYTE
        self._num_tags = comm.Get_attr(session.mpi.TAG_UB) - _FIRST_LONG_TAG
        self._status = session.mpi.Status()
        self._room = np.empty(HEADER_BYTES + MOST_EAGER_BYTES, np.uint8)
        self._handlers: dict[int, Handler] = {}
        # Packets of groups that this rank has not used yet, and the groups that it has left, whose late packets are
        # dropped.
        self._unclaimed: dict[int, list[Packet]] = {}
        self._left: set[int] = set()
        # Token of the group, request, copy.
        self._copies: deque[tuple[int, Any, bytes]] = deque()
        self._copied_bytes = 0
        self._numbered = 0
        # Packets, by rank of the communicator.
        self.num_sent: Counter[int] = Counter()
        self.num_received: Counter[int] = Counter()
        self._coming: Any = None
        self._listen()
        atexit.register(self._close)

    def register(self, token: int, handler: Handler) -> None:
        with self._session.lock:
            self._left.discard(token)
            self._handlers[token] = handler
            for packet in self._unclaimed.pop(token, ()):
                handler.handle(packet)

    def unregister(self, token: int) -> None:
        """Drop the packets that still arrive for a group."""
        with self._session.lock:
            self._handlers.pop(token, None)
            self._left.add(token)

    def poll(self) -> None:
        """Dispatch the packets that have arrived."""
        with self._session.lock:
            while self._coming is not None and self._coming.Test(self._status):
                self._take()
            if self._copies:
                self._forget_sent()

    def take_next(self, source: int, header: bytes, into: Array) -> bool | None:
        """Copy the payload of the next packet to `into` if it has this header and source; call with the lock held.

        None if no packet has arrived; False if a different one has, which is dispatched.
        """
        if self._coming is None or not self._coming.Test(self._status):
            return None
        end = HEADER_BYTES + into.size
        if self._status.Get_source() != source or self._room[:HEADER_BYTES].tobytes() != header:
            self._take()
            return False
        into[...] = self._room[HEADER_BYTES:end]
        self.num_received[source] += 1
        self._listen()
        return True

    def send_now(self, token: int, dst: int, packet: bytes) -> bool:
        """Send a packet, unless many are in flight; return whether it was sent."""
        with self._session.lock:
            if self._copies:
                self._forget_sent()
            if self._copied_bytes > _MOST_COPIED_BYTES:
                return False
            self._post(token, dst, packet)
            return True

    def send(self, token: int, dst: int, kind: int, tag: int, data: Array, dtype: bytes) -> None:
        packet = pack_header(token, kind, tag, data.size, dtype) + data.tobytes()
        with self._session.lock:
            self._post(token, dst, packet)

    def has_room(self) -> bool:
        """Return whether few copies are in flight."""
        self.poll()
        return self._copied_bytes <= _MOST_COPIED_BYTES

    def send_long(self, token: int, dst: int, tag: int, data: Array, dtype: bytes) -> Requests:
        """Announce a message and send its bytes; the requests complete when the receiver has them."""
        with self._session.lock:
            number = self._numbered
            self._numbered += 1
            self._post(token, dst, pack_header(token, RTS, tag, data.size, dtype, number))
            requests = [self._comm.Issend([piece, self._byte], dst, self._tag(number)) for piece in _pieces(data)]
        return Requests(self._session, requests, data)

    def fetch(self, packet: Packet, into: Array) -> Requests:
        with self._session.lock:
            requests = [
                self._comm.Irecv([piece, self._byte], packet.source, self._tag(packet.number))
                for piece in _pieces(into)
            ]
        return Requests(self._session, requests, into)

    def all_sent(self, token: int) -> bool:
        """Return whether no copy of a group is in flight."""
        self.poll()
        with self._session.lock:
            return all(request.Test() for group, request, _ in self._copies if group == token)

    def _post(self, token: int, dst: int, packet: bytes) -> None:
        # MPI buffers small messages at once; the copy of any other must stay alive.
        self.num_sent[dst] += 1
        request = self._comm.Isend([packet, self._byte], dst, _PACKET_TAG)
        if not request.Test():
            self._copies.append((token, request, packet))
            self._copied_bytes += len(packet)

    def _take(self) -> None:
        source, length = self._status.Get_source(), self._status.Get_count(self._byte)
        header = _HEADER.unpack_from(self._room.data)
        self._dispatch(header[0], Packet(source, header, self._room[HEADER_BYTES:length]))
        self.num_received[source] += 1
        self._listen()

    def _tag(self, number: int) -> int:
        # Two messages between the same ranks share a tag only if as many are in flight as there are tags.
        return _FIRST_LONG_TAG + int(number % self._num_tags)

    def _dispatch(self, token: int, packet: Packet) -> None:
        handler = self._handlers.get(token)
        if handler is not None:
            handler.handle(packet)
        elif token not in self._left:
            packet.data = packet.data.copy()
            self._unclaimed.setdefault(token, []).append(packet)

    def _listen(self) -> None:
        self._coming = self._comm.Irecv([self._room, self._byte], self._session.mpi.ANY_SOURCE, _PACKET_TAG)

    def _forget_sent(self) -> None:
        while self._copies and self._copies[0][1].Test():
            self._copied_bytes -= len(self._copies.popleft()[2])

    def _close(self) -> None:
        # MPI_Finalize runs at exit and waits for pending requests.
        if self._session.mpi.Is_finalized() or self._coming is None:
            return
        with self._session.lock:
            coming, self._coming = self._coming, None
            coming.Cancel()
            coming.Wait()


class Packets:
    """The packets exchanged with the ranks of a world; see `runtime.message_counts`."""

    def __init__(self, dispatcher: Dispatcher, peers: Peers) -> None:
        self._dispatcher = dispatcher
        self._addresses = [peers.joined_as(rank) for rank in range(peers.num_ranks)]

    def carried(self) -> dict[int, Carried]:
        dispatcher = self._dispatcher
        dispatcher.poll()
        sent, received = dispatcher.num_sent, dispatcher.num_received
        found = {rank: Carried(sent[address], received[address]) for rank, address in enumerate(self._addresses)}
        return {rank: carried for rank, carried in found.items() if any(carried)}


class ProcessResources:
    """Shared by all groups of this process."""

    def __init__(self, session: Session, comm: Any) -> None:
        self.dispatcher = Dispatcher(session, comm)
        self.arithmetic = Arithmetic(session)


def resources_of(session: Session) -> ProcessResources:
    """Return the resources that the groups of this process share.

    In a world that MPI did not create, it is unknown which ranks will ever use MPI, so the messages use MPI.COMM_WORLD
    itself, with small tags that are not negative: messages of the program there need other tags.
    """
    with session.lock:
        if session.shared is None:
            session.shared = ProcessResources(session, session.mpi.COMM_WORLD)
        shared: ProcessResources = session.shared
        return shared


def open_resources(session: Session) -> None:
    """Use a communicator of its own for messages from now on; collective over all ranks of MPI, once."""
    with session.lock:
        if session.shared is None:
            comm = session.mpi.COMM_WORLD.Dup()
            comm.Set_errhandler(session.mpi.ERRORS_RETURN)
            session.shared = ProcessResources(session, comm)


def _pieces(data: Array) -> list[Array]:
    return [data[begin : begin + _PIECE_BYTES] for begin in range(0, max(data.size, 1), _PIECE_BYTES)]
