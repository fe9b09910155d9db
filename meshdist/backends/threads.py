"""The `threads` backend: ranks that are threads of one process.

It implements messages and the comparison of calls; collectives run by their default algorithms. Tests and notebooks run
real meshes on it in milliseconds; it is not made for speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.base import Backend
from meshdist.backends.group_setup import SetUpWait
from meshdist.backends.p2p.eager_messages import DtypeNames, eager_bytes
from meshdist.backends.p2p.match_queue import MatchQueue
from meshdist.backends.p2p.own_messages import OwnMessages
from meshdist.backends.p2p.requests import (
    NO_ARRAY,
    NO_TAG,
    Probing,
    RecvRequest,
    SendRequest,
    UnexpectedMessage,
    arrive,
    post,
)
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.call import Signature
from meshdist.runtime.call_mismatch import CallCheck, call_lines
from meshdist.runtime.departure import Departure, LeftOut, any_of, describe, gave_up, nobody_left, peer_gone
from meshdist.runtime.waiting import Doorbell, Incoming, Probe, Waitable
from meshdist.store import HashStore, PrefixStore, Store


class Room:
    """The shared state of one group: match queues, calls, and the ranks that have left."""

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.RLock()
        self.boxes: list[MatchQueue[_Message, _Recv]] = [MatchQueue(self.lock) for _ in range(num_ranks)]
        # The last two calls of each rank: number, signature, call site. No rank is two calls ahead of another.
        self.calls = [[(-1, Signature(""), "")] * 2 for _ in range(num_ranks)]
        self.departures: dict[int, Departure] = {}
        self.sleepers: set[Doorbell] = set()
        self.probing: set[Doorbell] = set()  # those of the sleepers that wait for a message without a receive

    def wake(self) -> None:
        """Wake all waiting threads after a change; called with the lock held."""
        for bell in self.sleepers:
            bell.ring()

    def leave(self, rank: int, departure: Departure) -> None:
        """Record how `rank` leaves the group; the first departure counts."""
        with self.lock:
            self.departures.setdefault(rank, departure)
            self.wake()


class ThreadStore(HashStore):
    """The store of ranks that are threads; it also holds the rooms, which a store of bytes cannot."""

    def __init__(self) -> None:
        super().__init__()
        self._room_lock = threading.Lock()
        self._rooms: dict[str, tuple[tuple[int, ...], Room]] = {}
        self._ended: dict[int, Departure] = {}

    def room(self, name: str, ranks: tuple[int, ...]) -> Room:
        """Return the room of a group; `ranks` are the global ranks at the start of the world."""
        with self._room_lock:
            if name not in self._rooms:
                self._rooms[name] = ranks, Room(len(ranks))
                for rank, departure in self._ended.items():
                    self._announce(name, rank, departure)
            return self._rooms[name][1]

    def forget(self, name: str) -> None:
        """Drop the room of a group that all its ranks have left."""
        with self._room_lock:
            self._rooms.pop(name, None)

    def end(self, rank: int, departure: Departure) -> None:
        """Record how the thread of a global rank has ended, in all rooms."""
        with self._room_lock:
            self._ended[rank] = departure
            for name in self._rooms:
                self._announce(name, rank, departure)

    def _announce(self, name: str, rank: int, departure: Departure) -> None:
        ranks, room = self._rooms[name]
        if rank in ranks:
            room.leave(ranks.index(rank), departure)


class _InRoom(Waitable):
    """A wait for another rank's change of the room."""

    def __init__(self, options: BackendOptions, room: Room) -> None:
        self.room = room
        self._options = options

    def departure(self, rank: int) -> Departure | None:
        """Return how a rank has left the group, even before it used the room; None if it has not."""
        departures = self.room.departures
        left = departures.get(rank) or self._options.gone(rank)
        # It may have given up the group, and then left the world, since the first look.
        return departures.get(rank) or left

    def arm(self, bell: Doorbell) -> None:
        with self.room.lock:
            self.room.sleepers.add(bell)

    def disarm(self, bell: Doorbell) -> None:
        with self.room.lock:
            self.room.sleepers.discard(bell)


class _CheckIn(_InRoom):
    """Wait until all ranks have made their call number `number`."""

    def __init__(self, options: BackendOptions, room: Room, number: int) -> None:
        super().__init__(options, room)
        self._number = number

    def absent(self) -> list[int]:
        """Return the ranks that have not made the call."""
        return [rank for rank, calls in enumerate(self.room.calls) if calls[self._number % 2][0] < self._number]

    def ready(self) -> bool:
        return not self.absent()

    def check(self) -> None:
        mine = self.room.departures.get(self._options.rank)
        if mine is not None:
            # Another thread of this rank gave up the group.
            raise DistBackendError(f"this rank {describe(mine)}")
        self._options.check_preconditions()
        for rank in self.absent():
            departure = self.departure(rank)
            if departure is not None:
                raise peer_gone(self._options.call(rank), departure, LeftOut.CALL, rank=self._options.ranks[rank])

    def missing(self) -> str:
        return ", ".join(map(self._options.call, self.absent()))

    def awaits(self) -> list[int]:
        return [self._options.ranks[rank] for rank in self.absent()]


class _Send(_InRoom, SendRequest):
    def __init__(self, options: BackendOptions, room: Room, dst: int) -> None:
        super().__init__(options, room)
        self._dst = dst

    def check(self) -> None:
        departure = self.departure(self._dst)
        if departure is not None:
            raise peer_gone(
                self._options.call(self._dst), departure, LeftOut.RECEIVE, rank=self._options.ranks[self._dst]
            )

    def receiver_words(self) -> str:
        return self._options.call(self._dst)

    def awaits(self) -> list[int]:
        return [self._options.ranks[self._dst]]


class _Message(UnexpectedMessage):
    """A message whose bytes stay in the sender's array until they are fetched; used with the room's lock held."""

    def __init__(self, send: _Send, array: Array, dst: int, source: int, tag: int, name: bytes) -> None:
        super().__init__(send.room.boxes[dst], source, tag, array.nbytes, name, is_announced=True)
        self._send = send
        self._array = array

    def fetch(self, target: Array, then: Callable[[], None]) -> None:
        target[...] = as_bytes(self._array)
        self._send.done = True
        then()


class _Recv(_InRoom, RecvRequest):
    def __init__(
        self, options: BackendOptions, room: Room, array: Array, name: bytes, wanted: int | None, tag: int
    ) -> None:
        _InRoom.__init__(self, options, room)
        RecvRequest.__init__(self, array, name, wanted, tag, room.boxes[options.rank])

    def progress(self) -> None:
        """Do nothing: the sender delivers the message."""

    def check(self) -> None:
        try:
            self._check_sources()
        except DistBackendError as error:
            self.add_instead(error)
            raise

    def _check_sources(self) -> None:
        sources = self._others() if self.wanted is None else [self.wanted]
        # With any source, a rank that ended in order is no error while others may still send.
        gone = {rank: departure for rank in sources if (departure := self.departure(rank)) is not None}
        for rank, departure in gone.items():
            if not departure.exit.is_orderly or self.wanted is not None:
                raise peer_gone(self._options.call(rank), departure, LeftOut.SEND, rank=self._options.ranks[rank])
        if len(gone) == len(sources):
            raise nobody_left({self._options.call(rank): departure for rank, departure in gone.items()})

    def source_words(self) -> str:
        return any_of(self._others(), self._options.call) if self.wanted is None else super().source_words()

    def awaits(self) -> list[int]:
        sources = self._others() if self.wanted is None else [self.wanted]
        return [self._options.ranks[sources[0]]] if len(sources) == 1 else []

    def awaits_any(self) -> list[int]:
        others = self._others() if self.wanted is None else []
        return [self._options.ranks[rank] for rank in others] if len(others) > 1 else []

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.room.boxes)) if rank != self._options.rank]


class _Probe(Probing, _Recv):
    def __init__(self, options: BackendOptions, room: Room, wanted: int | None, tag: int | None) -> None:
        self.wanted_tag = tag
        super().__init__(options, room, *NO_ARRAY, wanted, NO_TAG if tag is None else tag)

    def arm(self, bell: Doorbell) -> None:
        super().arm(bell)
        with self.room.lock:
            self.room.probing.add(bell)

    def disarm(self, bell: Doorbell) -> None:
        super().disarm(bell)
        with self.room.lock:
            self.room.probing.discard(bell)


class ThreadsBackend(Backend):
    """A group of ranks that are threads."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        root: Store = options.store
        path = []
        while isinstance(root, PrefixStore):
            path.append(root.prefix)
            root = root.underlying_store
        if not isinstance(root, ThreadStore):
            raise ValueError("the 'threads' backend is for ranks that are threads: use meshdist.run(fn, world_size)")
        # Worlds that shrink have groups of the same names, with renumbered ranks.
        self._name = "/".join(reversed(path))
        self._store = root
        self._room = root.room(self._name, tuple(map(options.peers.joined_as, options.ranks)))
        self._room.boxes[options.rank].describe = options.call
        self._own = OwnMessages(options.rank, self._room.boxes[options.rank])
        self._eager_bytes = eager_bytes()
        self._names = DtypeNames()
        self._sent_to: set[int] = set()
        self._calls_made = 0

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        room = self._room
        send = _Send(self.options, room, dst)
        message = _Message(send, array, dst, self.rank, tag, self._names[array.dtype])
        with room.lock:
            if tag >= 0 and (dst in room.departures or dst not in self._sent_to):
                send.check()
                self._sent_to.add(dst)
            # Messages of collectives are always buffered: the limit is for users' messages.
            if tag < 0 or array.nbytes <= self._eager_bytes:
                message.pull()
            if arrive(message) or room.probing:
                room.wake()
        return send

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        request = _Recv(self.options, self._room, array, self._names[array.dtype], src, tag)
        with self._room.lock:
            post(request)
            self._room.wake()
        return request

    def probe(self, src: int | None, tag: int | None) -> Probe:
        return _Probe(self.options, self._room, src, tag)

    def own_messages(self) -> OwnMessages:
        return self._own

    def left_over(self) -> list[tuple[int, int]]:
        return self._room.boxes[self.rank].left_over()

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        number, room = self._calls_made, self._room
        self._calls_made += 1
        with room.lock:
            room.calls[self.rank][number % 2] = number, signature, call_lines()
            room.wake()
        arrival = _CheckIn(self.options, room, number)
        yield SetUpWait(arrival, self.options) if number == 0 else arrival
        calls = [calls[number % 2] for calls in room.calls]
        if len({made.compared for _, made, _ in calls}) > 1:
            told = {rank: f"{made.text} at {site}" for rank, (_, made, site) in enumerate(calls)}
            raise CallCheck(self.rank, self.options.ranks).error(told)

    def is_behind(self) -> bool:
        number = self._calls_made
        with self._room.lock:
            return any(calls[number % 2][0] == number for calls in self._room.calls)

    def describe(self, rank: int) -> str:
        return self.options.call(rank)

    def departure_of(self, rank: int) -> Departure | None:
        return self._room.departures.get(rank) or super().departure_of(rank)

    def give_up(self, error: DistError) -> None:
        self._room.leave(self.rank, gave_up(error))

    def close(self) -> None:
        self._room.leave(self.rank, self.options.peers.departure)
        if len(self._room.departures) == self.size:
            self._store.forget(self._name)
