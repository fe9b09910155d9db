"""GroupReceiveState: what has arrived over TCP for one group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from meshdist.arrays.host import Array
from meshdist.backends.gloo.match import GlooMatchQueue
from meshdist.backends.gloo.tcp.collective_frames import AwaitedPeer, CollectiveFrames
from meshdist.backends.gloo.tcp.connection import Connection, Place
from meshdist.backends.gloo.tcp.frames import CTS, MISMATCH, Header, pack
from meshdist.backends.p2p.requests import RecvRequest, UnexpectedMessage
from meshdist.runtime.departure import Departure
from meshdist.system.deferring_lock import Lock

# Unexpected messages are kept up to this total; beyond it the sender waits, unless this rank waits for it.
MOST_KEPT_BYTES = 16 << 20
_NOTHING: Place = (None, None)


class PeerLink(AwaitedPeer, Protocol):
    """The `Link` with one peer."""

    rank: int
    lock: Lock

    def expect(
        self, number: int, place: memoryview, then: Callable[[], None], receive_state: GroupReceiveState
    ) -> None: ...

    def send_frame(self, header: bytes, data: bytes = b"") -> None: ...


class GroupReceiveState:
    """What has arrived for one group. It may exist before this rank uses the group."""

    def __init__(self, token: int) -> None:
        self.collectives = CollectiveFrames()
        self.queue = GlooMatchQueue()  # the group's match queue, for messages from this host as well
        self.departures: dict[int, Departure] = {}  # how ranks left the group, or gave it up
        self.completed_by: dict[int, int] = {}  # for each rank that left, how many collectives it had completed
        self.ranks: tuple[int, ...] = ()  # the global ranks of the group; empty until this rank uses it
        self.is_open = True  # False once the group is closed or given up: arriving frames are discarded
        # This rank's LEFT frame once it has closed the group or given it up; peers that connect later get it.
        self.last_words: tuple[bytes, bytes] | None = None
        self.token = token
        self._kept_bytes = 0

    def awaits(self, link: PeerLink) -> bool:
        if link.rank not in self.ranks:
            return False
        src = self.ranks.index(link.rank)
        with self.queue.lock:
            probed = self.queue.probed
            return self.collectives.expects(src) or self.queue.awaits(src) or src in probed or None in probed

    def eager(self, link: PeerLink, header: Header, connection: Connection) -> Place:
        _, src, _, tag, num_bytes, _, dtype = header
        queue = self.queue
        with queue.lock:
            request = queue.match(src, tag)
            if request is None and self._kept_bytes + num_bytes <= MOST_KEPT_BYTES:
                return self._keep(header)
        if request is None:
            if not (connection.is_closed or link.is_waited_for()):
                connection.hold()
                return _NOTHING
            with queue.lock:
                request = queue.match(src, tag)  # it may have been posted meanwhile
                if request is None:
                    return self._keep(header)
        target = request.target(src, num_bytes, dtype)
        return _NOTHING if target is None else (target.data, request.complete)

    def take_text(self, header: Header, text: bytes) -> None:
        kind, src, _, _, _, word, _ = header
        if kind == MISMATCH:
            self.collectives.add_call(src, word, text)
        else:
            self.departures.setdefault(src, Departure.decode(text))
            self.completed_by[src] = word

    def release(self, num_bytes: int) -> None:
        with self.queue.lock:
            self._kept_bytes -= num_bytes

    def _keep(self, header: Header) -> Place:
        message = _KeptMessage(self, header)
        self.queue.add_unexpected(message, message.source, message.tag)
        self._kept_bytes += message.num_bytes
        return message.allocate().data, message.arrived


class LeftGroup:
    """What remains of a group that this rank has destroyed: its `last_words`, for peers that connect later."""

    __slots__ = ("_staying", "last_words", "ranks")

    def __init__(self, receive_state: GroupReceiveState, own_rank: int) -> None:
        self.ranks = receive_state.ranks
        self.last_words = receive_state.last_words
        gone = {own_rank, *(self.ranks[src] for src in receive_state.departures)}
        self._staying = {rank for rank in self.ranks if rank not in gone}

    @property
    def is_over(self) -> bool:
        """Whether all ranks have left, after which none sends frames for the group."""
        return not self._staying

    def leave(self, rank: int) -> None:
        self._staying.discard(rank)


class _KeptMessage(UnexpectedMessage):
    def __init__(self, receive_state: GroupReceiveState, header: Header) -> None:
        _, src, _, tag, num_bytes, _, dtype = header
        super().__init__(receive_state.queue, src, tag, num_bytes, dtype)
        self._receive_state = receive_state

    def deliver(self, request: RecvRequest) -> None:
        self._receive_state.release(self.num_bytes)
        super().deliver(request)


class AnnouncedMessage(UnexpectedMessage):
    """A long message. Its sender sends the bytes when this rank has answered CTS."""

    def __init__(self, receive_state: GroupReceiveState, link: PeerLink, header: Header) -> None:
        _, src, _, tag, num_bytes, self._number, dtype = header
        super().__init__(receive_state.queue, src, tag, num_bytes, dtype, is_announced=True)
        self._receive_state = receive_state
        self._link = link

    def fetch(self, target: Array, then: Callable[[], None]) -> None:
        with self._link.lock:
            self._link.expect(self._number, target.data, then, self._receive_state)
            self._link.send_frame(pack(CTS, self.source, self._receive_state.token, number=self._number))
