"""Link: all that there is between this rank and one peer."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from meshdist.backends.gloo.wire.bag import Bag
from meshdist.backends.gloo.wire.connection import Connection, Outgoing, Place
from meshdist.backends.gloo.wire.frames import (
    BYE,
    CALLED,
    DATA,
    FAILED,
    GO,
    LEFT,
    LONG,
    PART,
    WHOLE,
    FrameError,
    Header,
)
from meshdist.farewell import DIED, LEFT_THE_WORLD
from meshdist.rank_words import call_process

if TYPE_CHECKING:
    from meshdist.backends.gloo.wire.wire import Wire

# Where one of several connections has ended, how long what is still in the others may take to be read.
_LAST_WORDS_S = 0.5
_NOWHERE: Place = (None, None)
_EMPTY = memoryview(b"")


class Announced(Protocol):
    """A long message that waits to be let go."""

    def go(self) -> None:
        """Send it."""


class Link:
    """The connections with one peer, and what is under way over them.

    Two ranks that begin to talk to each other at once have a connection each; both take what comes over either, and
    each sends over one alone, so that what it says keeps its order.

    Args:
        wire: The wire that it is of.
        rank: The peer's global rank.
        process: What messages call the peer's process.

    Attributes:
        lock: The lock of the wire.
        trouble: Why there is no connection, where one was tried in vain.
        heard_over: The connection that the peer sends messages over, once it has sent one.
    """

    def __init__(self, wire: Wire, rank: int, process: str) -> None:
        self.rank = rank
        self._process = process
        self.lock = wire.lock
        self.trouble = ""
        self.heard_over: Connection | None = None
        self._wire = wire
        self._connections: list[Connection] = []
        self._outgoing: Connection | None = None
        self._pending: deque[Outgoing] = deque()
        self._numbers = itertools.count(1)
        self._announced: dict[int, Announced] = {}
        self._expected: dict[int, tuple[memoryview | None, Callable[[], None] | None, Bag]] = {}
        self._has_said_bye = False
        self._end: str | None = None
        self._since_s = 0.0

    def describe(self, bag: Bag) -> str:
        """Return what messages about a group that the peer is in call it."""
        return call_process(bag.ranks.index(self.rank), bag.ranks, self._process)

    @property
    def is_connected(self) -> bool:
        """Whether there is, or was, a connection."""
        return bool(self._connections) or self._end is not None

    @property
    def is_listened_to(self) -> bool:
        """Whether all that the peer says is read as it comes."""
        return bool(self._connections) and not any(connection.is_held for connection in self._connections)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room, or for a connection."""
        return bool(self._pending) or any(connection.has_unsent for connection in self._connections)

    def is_waited_for(self) -> bool:
        """Return whether this rank waits for anything of the peer."""
        return bool(self._announced or self._expected) or self._wire.asks(self)

    def end(self) -> str | None:
        """Return what became of the peer, None as long as it can be talked to."""
        if self._end is None or (self._connections and time.monotonic() - self._since_s < _LAST_WORDS_S):
            return None
        return self._end

    def farewell(self) -> str | None:
        """Return what the peer said in the store as it left the world; None where it has not."""
        return self._wire.farewell_of(self.rank)

    @property
    def sent_over(self) -> Connection | None:
        """The connection that this rank sends over, once there is one."""
        return self._outgoing

    def send(self, outgoing: Outgoing) -> None:
        """Send, over a connection that is made if there is none."""
        with self.lock:
            if self._outgoing is None and self._connections:
                self._outgoing = self._connections[0]
            if self._outgoing is not None:
                if self._outgoing.ended is None:
                    self._outgoing.send(outgoing)
                return
            self._pending.append(outgoing)
            if self._end is None:
                self._wire.call(self)

    def say(self, header: bytes, data: bytes = b"") -> None:
        """Send something that nobody waits for."""
        self.send(Outgoing(header, memoryview(data)))

    def announce(self, message: Announced) -> int:
        """Return a number for a long message, which `go` is called of when the peer takes it."""
        with self.lock:
            number = next(self._numbers)
            self._announced[number] = message
        return number

    def expect(self, number: int, place: memoryview, then: Callable[[], None], bag: Bag) -> None:
        """Have the bytes of a long message of the peer go to `place`."""
        self._expected[number] = (place, then, bag)
        self.go_on()  # they may be behind what nobody asks for

    def go_on(self) -> None:
        """Take what was held back until this rank waits for something of the peer."""
        with self.lock:
            for connection in list(self._connections):
                connection.go_on()

    def divert(self, bag: Bag) -> None:
        """Have what comes for a group go nowhere from now on: its arrays are no longer the wire's."""
        for connection in self._connections:
            connection.divert(bag.token)
        for number, (_, _, other) in list(self._expected.items()):
            if other is bag:
                self._expected[number] = (None, None, bag)

    def adopt(self, connection: Connection) -> None:
        """Take a new connection."""
        self._connections.append(connection)
        for header, data in self._wire.last_words(self.rank) if len(self._connections) == 1 else ():
            connection.send(Outgoing(header, memoryview(data)))
        if self._pending and self._outgoing is None:
            self._outgoing = connection
            while self._pending:
                connection.send(self._pending.popleft())

    def give_up(self, why: str) -> None:
        """Learn that no connection can be made."""
        self.trouble = why
        if not self._connections and self._end is None:
            self._end = f"cannot be reached: {why}"

    def close(self, farewell: bytes) -> None:
        """Say farewell over all connections, and say nothing more."""
        for connection in list(self._connections):
            connection.send(Outgoing(farewell, _EMPTY))

    def shut(self) -> None:
        """Close all connections."""
        for connection in list(self._connections):
            connection.shut()

    def all_arrived(self) -> bool:
        """Return whether the peer's system has all that was sent."""
        return all(connection.all_arrived() for connection in self._connections)

    def take(self, header: Header, connection: Connection) -> Place:
        """Take a header that has come; see `Sink`."""
        kind, src, group, _, num_bytes, number, _ = header
        if kind == DATA:
            return self._data(number, num_bytes)
        if kind == BYE:
            self._has_said_bye = True
            return _NOWHERE
        bag = self._wire.bag(group)
        if kind == GO:
            message = self._announced.pop(number, None)
            if message is not None:
                message.go()
        elif not bag.is_open:
            return _NOWHERE
        elif bag.ranks and (src >= len(bag.ranks) or bag.ranks[src] != self.rank):
            raise FrameError(f"a header of rank {src} in a group where it has another number")
        elif kind == PART:
            return bag.parts.take(self, header, connection)
        elif kind == WHOLE:
            self.heard_over = connection
            return bag.whole(self, header, connection)
        elif kind == LONG:
            bag.announced(self, header)
        elif kind in (CALLED, FAILED, LEFT):
            text = bytearray(num_bytes)
            return memoryview(text), lambda: bag.say(header, bytes(text))
        return _NOWHERE

    def over(self, connection: Connection) -> None:
        """Learn that a connection has ended."""
        self._connections.remove(connection)
        if self._end is None:
            self._since_s = time.monotonic()
            why = f"cannot be reached any more: {connection.ended}" if connection.ended else DIED
            self._end = LEFT_THE_WORLD if self._has_said_bye else why
            if self._end == DIED:
                self._wire.lost(self.rank)

    def _data(self, number: int, num_bytes: int) -> Place:
        place, then, _ = self._expected.pop(number, _UNKNOWN)
        if place is not None and len(place) != num_bytes:
            raise FrameError(f"{num_bytes} bytes of a message that was announced with {len(place)}")
        return place, then


_UNKNOWN: Any = (None, None, None)
