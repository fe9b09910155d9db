"""Link: the connections with one peer, and the messages in progress on them."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from meshdist.backends.gloo.tcp.connection import Connection, Place
from meshdist.backends.gloo.tcp.frames import BYE, COLLECTIVE, CTS, DATA, EAGER, LEFT, MISMATCH, RTS, FrameError, Header
from meshdist.backends.gloo.tcp.group_receive_state import AnnouncedMessage, GroupReceiveState
from meshdist.backends.gloo.tcp.outgoing import Outgoing
from meshdist.backends.gloo.tcp.resumption import Identity, Owner, Resumptions
from meshdist.backends.p2p.requests import arrive
from meshdist.runtime.departure import Departure, PeerExit
from meshdist.runtime.message_counts import Carried
from meshdist.runtime.rank_text import call_process

# After the end of one of several connections, how long the frames left in the others may take to be read.
_LAST_WORDS_S = 0.5
_NOWHERE: Place = (None, None)
_EMPTY = memoryview(b"")


class LinkOwner(Owner, Protocol):
    """The transport, as its links use it."""

    def awaits(self, link: Link) -> bool: ...

    def departure_of(self, rank: int) -> Departure | None: ...

    def connect(self, link: Link) -> None: ...

    def last_words(self, rank: int) -> list[tuple[bytes, bytes]]: ...

    def receive_state(self, token: int) -> GroupReceiveState: ...

    def has_left(self, token: int) -> bool: ...

    def note_left(self, token: int, rank: int) -> None: ...

    def report_lost(self, rank: int) -> None: ...

    @property
    def is_open(self) -> bool: ...


class AnnouncedSend(Protocol):
    """A long message that has been announced; `send_data` sends its bytes."""

    def send_data(self) -> None: ...


class Link:
    """The connections with one peer.

    Two ranks that connect to each other at the same time have two connections. Both read from either, and each sends
    over one alone, so its frames stay in order.
    """

    def __init__(self, transport: LinkOwner, rank: int, process: str) -> None:
        self.rank = rank
        self._process = process
        self.lock = transport.lock
        self.resumptions = Resumptions(transport, rank)
        self._connect_error = ""
        # The one that the peer sends messages over, once it has sent one.
        self.recv_connection: Connection | None = None
        self._transport = transport
        self._connections: list[Connection] = []
        self._outgoing: Connection | None = None
        self._pending: deque[Outgoing] = deque()
        self._numbers = itertools.count(1)
        self._announced: dict[int, AnnouncedSend] = {}
        self._expected: dict[int, tuple[memoryview, Callable[[], None], GroupReceiveState]] = {}
        self._got_bye = False
        self._end: Departure | None = None
        self._since_s = 0.0
        self._num_sent = self._num_handled = 0  # bytes on connections that have ended

    def describe(self, receive_state: GroupReceiveState) -> str:
        return call_process(receive_state.ranks.index(self.rank), receive_state.ranks, self._process)

    @property
    def connect_error(self) -> str:
        """Why there is no connection; empty if there is one, or one is being made for the first time."""
        return self._connect_error or self.resumptions.describe()

    @property
    def is_connected(self) -> bool:
        return bool(self._connections) or self._end is not None

    @property
    def is_read(self) -> bool:
        """Whether frames from the peer are read as they arrive."""
        return bool(self._connections) and not any(connection.is_held for connection in self._connections)

    @property
    def has_unsent(self) -> bool:
        return bool(self._pending) or any(connection.has_unsent for connection in self._connections)

    def is_waited_for(self) -> bool:
        return bool(self._announced or self._expected) or self._transport.awaits(self)

    def end(self) -> Departure | None:
        """Return how the peer ended; None while it can be reached. Called by threads that wait, and read."""
        for connection in list(self._connections):
            if connection.is_silent():
                with self.lock:
                    connection.leave_silent()
        if self._end is None or (self._connections and self.has_just_ended):
            return None
        return self._end

    @property
    def has_just_ended(self) -> bool:
        return time.monotonic() - self._since_s < _LAST_WORDS_S

    def departure(self) -> Departure | None:
        """Return the record that the peer left in the store; raise DistError if the store is lost."""
        return self._transport.departure_of(self.rank)

    @property
    def send_connection(self) -> Connection | None:
        return self._outgoing

    def send(self, outgoing: Outgoing) -> None:
        with self.lock:
            if self._outgoing is None and self._connections:
                self._outgoing = self._connections[0]
            if self._outgoing is not None:
                if self._outgoing.ended is None:
                    self._outgoing.send(outgoing)
                return
            self._pending.append(outgoing)
            if self._end is None:
                self._transport.connect(self)

    def carried(self) -> Carried:
        """Return the bytes of frames in both directions; needs the lock."""
        connections = self._connections
        waiting = sum(outgoing.size for outgoing in self._pending)
        return Carried(
            self._num_sent + waiting + sum(connection.num_sent for connection in connections),
            self._num_handled + sum(connection.num_handled for connection in connections),
            any(connection.is_held for connection in connections),
        )

    def send_frame(self, header: bytes, data: bytes = b"") -> None:
        """Send without a wait for completion."""
        self.send(Outgoing(header, memoryview(data)))

    def announce(self, message: AnnouncedSend) -> int:
        with self.lock:
            number = next(self._numbers)
            self._announced[number] = message
        return number

    def expect(
        self, number: int, place: memoryview, then: Callable[[], None], receive_state: GroupReceiveState
    ) -> None:
        self._expected[number] = (place, then, receive_state)
        self.resume()  # they may be behind a held frame

    def resume(self) -> None:
        """Parse what was held until this rank waits for the peer."""
        with self.lock:
            for connection in list(self._connections):
                connection.resume()

    def discard(self, receive_state: GroupReceiveState) -> None:
        """Discard what still arrives for a group, whose arrays belong to the user again."""
        for connection in self._connections:
            connection.discard(receive_state.token)
        for number, (_, _, other) in list(self._expected.items()):
            if other is receive_state:
                del self._expected[number]

    def adopt(self, connection: Connection, identity: Identity) -> None:
        self.resumptions.add(connection, identity)
        self._connections.append(connection)
        for header, data in self._transport.last_words(self.rank) if len(self._connections) == 1 else ():
            connection.send(Outgoing(header, memoryview(data)))
        if self._pending and self._outgoing is None:
            self._outgoing = connection
            while self._pending:
                connection.send(self._pending.popleft())

    def give_up(self, why: str) -> None:
        self._connect_error = why
        if not self._connections and self._end is None:
            self._end = Departure(PeerExit.UNREACHABLE, detail=why)

    def close(self, bye: bytes) -> None:
        for connection in list(self._connections):
            connection.send(Outgoing(bye, _EMPTY))

    def shut(self) -> None:
        for connection in list(self._connections):
            connection.shut()

    def all_arrived(self) -> bool:
        return all(connection.all_arrived() for connection in self._connections)

    def take(self, header: Header, connection: Connection) -> Place:
        kind, src, group, _, num_bytes, number, _ = header
        if kind == DATA:
            return self._data(number, num_bytes)
        if kind == BYE:
            self._got_bye = True
            return _NOWHERE
        if kind == CTS:
            message = self._announced.pop(number, None)
            if message is not None:
                message.send_data()
            return _NOWHERE
        if self._transport.has_left(group):
            if kind == LEFT:
                self._transport.note_left(group, self.rank)
            return _NOWHERE
        receive_state = self._transport.receive_state(group)
        if not receive_state.is_open:
            return _NOWHERE
        if receive_state.ranks and (src >= len(receive_state.ranks) or receive_state.ranks[src] != self.rank):
            raise FrameError(f"a header of rank {src} in a group where it has a different number")
        if kind == COLLECTIVE:
            return receive_state.collectives.take(self, header, connection)
        if kind == EAGER:
            self.recv_connection = connection
            return receive_state.eager(self, header, connection)
        if kind == RTS:
            arrive(AnnouncedMessage(receive_state, self, header))
        elif kind in (MISMATCH, LEFT):
            text = bytearray(num_bytes)
            return memoryview(text), lambda: receive_state.take_text(header, bytes(text))
        return _NOWHERE

    def on_broken(self, connection: Connection, how: Departure) -> None:
        if self._got_bye or not self._transport.is_open:
            connection.end(how)
        else:
            self.resumptions.begin(connection, how)

    def on_closed(self, connection: Connection) -> None:
        self.resumptions.remove(connection)
        self._connections.remove(connection)
        self._num_sent += connection.num_sent
        self._num_handled += connection.num_handled
        if self._end is None:
            self._since_s = time.monotonic()
            if self._got_bye:
                self._end = Departure(PeerExit.LEFT_WORLD)
            else:
                assert connection.ended is not None
                self._end = connection.ended
                if self._end.exit is PeerExit.DIED:
                    self._transport.report_lost(self.rank)

    def _data(self, number: int, num_bytes: int) -> Place:
        place, then, _ = self._expected.pop(number, _UNKNOWN)
        if place is not None and len(place) != num_bytes:
            raise FrameError(f"{num_bytes} bytes of a message that was announced with {len(place)}")
        return place, then


_UNKNOWN: Any = (None, None, None)
