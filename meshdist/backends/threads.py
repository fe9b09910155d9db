"""Backend `threads`: ranks that are threads of one process.

It implements what every backend must, messages and the comparison of calls, and runs every collective by its default
algorithm. Tests and notebooks run real meshes on it in milliseconds; it is not made for speed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from meshdist.arrays import Array, describe_array
from meshdist.backends.base import Backend, BackendOptions, Incoming
from meshdist.backends.matching import Matching, eager_bytes, there_are
from meshdist.backends.whereabouts import SetUpWait
from meshdist.call import Signature, call_site
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError
from meshdist.farewell import ORDERLY, any_of, nobody_left, peer_gone
from meshdist.store import HashStore, PrefixStore, Store
from meshdist.waiting import Doorbell, Waitable


class Room:
    """Where the ranks of one group meet: their messages, their calls, and who has given up."""

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.Lock()
        # For each rank, the messages to it and the receipts that it has posted.
        self.boxes: list[Matching[_Message, _Receipt]] = [Matching() for _ in range(num_ranks)]
        # The last two calls of each rank: number, signature, file and line. No rank is two calls ahead of another.
        self.calls = [[(-1, Signature(""), "")] * 2 for _ in range(num_ranks)]
        self.faults: dict[int, str] = {}
        self.sleepers: set[Doorbell] = set()

    def wake(self) -> None:
        """Wake all who wait for something here; called with the lock held, after a change."""
        for bell in self.sleepers:
            bell.ring()

    def fail(self, rank: int, reason: str) -> None:
        """Say that `rank` cannot go on."""
        with self.lock:
            self.faults.setdefault(rank, reason)
            self.wake()


class ThreadStore(HashStore):
    """The store of ranks that are threads; it holds the rooms as well, which a store of bytes cannot.

    Example:
        >>> store = ThreadStore()
        >>> store.room("a group", (0, 1)) is store.room("a group", (0, 1))
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._room_lock = threading.Lock()
        self._rooms: dict[str, tuple[tuple[int, ...], Room]] = {}
        self._ended: dict[int, str] = {}

    def room(self, name: str, ranks: tuple[int, ...]) -> Room:
        """Return the room of a group, the same for all its ranks, which are given as they joined."""
        with self._room_lock:
            if name not in self._rooms:
                self._rooms[name] = ranks, Room(len(ranks))
                for rank, reason in self._ended.items():
                    self._announce(name, rank, reason)
            return self._rooms[name][1]

    def forget(self, name: str) -> None:
        """Give up the room of a group that all its ranks have left."""
        with self._room_lock:
            self._rooms.pop(name, None)

    def end(self, rank: int, reason: str) -> None:
        """Say that the thread of a global rank has ended, and how, to all who wait for it."""
        with self._room_lock:
            self._ended[rank] = reason
            for name in self._rooms:
                self._announce(name, rank, reason)

    def _announce(self, name: str, rank: int, reason: str) -> None:
        ranks, room = self._rooms[name]
        if rank in ranks:
            room.fail(ranks.index(rank), reason)


class _InRoom(Waitable):
    """Something that another rank changes in the room."""

    def __init__(self, options: BackendOptions, room: Room) -> None:
        self.room = room
        self._options = options

    def fault(self, rank: int) -> str | None:
        """Return why nothing more comes from a rank, which may never have come to the room; None where it may."""
        return self.room.faults.get(rank) or self._options.gone(rank)

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell
        with self.room.lock:
            self.room.sleepers.add(bell)

    def disarm(self, bell: Doorbell) -> None:
        with self.room.lock:
            self.room.sleepers.discard(self._bell)


class _CheckIn(_InRoom):
    """All ranks have come to their call number `number`."""

    def __init__(self, options: BackendOptions, room: Room, number: int) -> None:
        super().__init__(options, room)
        self._number = number

    def absent(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank, calls in enumerate(self.room.calls) if calls[self._number % 2][0] < self._number]

    def ready(self) -> bool:
        return not self.absent()

    def check(self) -> None:
        if self._options.rank in self.room.faults:
            # Another thread of this rank gave the group up; what it says is on the group.
            raise DistBackendError(f"this rank {self.room.faults[self._options.rank]}")
        self._options.check_premises()
        for rank in self.absent():
            what = self.fault(rank)
            if what is not None:
                raise peer_gone(self._options.call(rank), what, "making this call")

    def missing(self) -> str:
        return ", ".join(map(self._options.call, self.absent()))


class _Message(_InRoom):
    """A message from a rank; done when its array is of no more use here."""

    def __init__(
        self, options: BackendOptions, room: Room, array: Array, dst: int, tag: int, *, buffered: bool
    ) -> None:
        super().__init__(options, room)
        self.array = array
        self.tag = tag
        self.source = options.rank
        self.done = False
        self._dst = dst
        if buffered:
            self.buffer()

    def buffer(self) -> None:
        """Copy the array, so that the sender goes on."""
        if not self.done:
            self.array = self.array.copy()
            self.done = True

    def ready(self) -> bool:
        return self.done

    def check(self) -> None:
        what = self.fault(self._dst)
        if what is not None:
            raise peer_gone(self._options.call(self._dst), what, "receiving the message")

    def missing(self) -> str:
        return f"{self._options.call(self._dst)} to receive a message"


class _Receipt(_InRoom, Incoming):
    """A message that a rank asks for."""

    def __init__(self, options: BackendOptions, room: Room, array: Array, wanted: int | None, tag: int) -> None:
        super().__init__(options, room)
        self.source = -1
        self._tag = tag
        self._array = array
        self._wanted = wanted
        self._done = False
        self._error: DistBackendError | None = None

    def take(self, message: _Message) -> None:
        """Take a message; whoever brought the two together does it, with the room's lock held."""
        self.source = message.source
        array = message.array
        if array.dtype != self._array.dtype or array.size != self._array.size:
            sent, expected = describe_array(array), describe_array(self._array)
            self._error = DistBackendError(
                f"the message from {self._options.call(self.source)} is {sent}, {array.nbytes} bytes,"
                f" the array to receive it {expected}, {self._array.nbytes} bytes"
            )
        else:
            self._array[...] = array.reshape(self._array.shape)
            message.done = True
        self._done = True
        self.room.wake()

    def ready(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._done

    def check(self) -> None:
        sources = [rank for rank in range(len(self.room.boxes)) if rank != self._options.rank]
        faults = {rank: self.fault(rank) for rank in (sources if self._wanted is None else [self._wanted])}
        # Of a rank that has ended well, another one may still send; not so where one rank is asked.
        gone = {rank: what for rank, what in faults.items() if what is not None}
        for rank, what in gone.items():
            if what not in ORDERLY or self._wanted is not None:
                raise peer_gone(self._options.call(rank), what, "sending a message")
        if len(gone) == len(faults):
            raise nobody_left({self._options.call(rank): what for rank, what in gone.items()})

    def missing(self) -> str:
        with self.room.lock:
            kept = sorted({message.tag for message in self.room.boxes[self._options.rank].kept(self._wanted)})
        others = [rank for rank in range(len(self.room.boxes)) if rank != self._options.rank]
        call = self._options.call
        source = any_of(others, call) if self._wanted is None else call(self._wanted)
        return f"a message from {source} with tag {self._tag}{there_are([tag for tag in kept if tag >= 0])}"


class ThreadsBackend(Backend):
    """The threads of a group of ranks."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        root: Store = options.store
        path = []
        while isinstance(root, PrefixStore):
            path.append(root.prefix)
            root = root.underlying_store
        if not isinstance(root, ThreadStore):
            raise ValueError("backend 'threads' is for ranks that are threads: use meshdist.run(fn, world_size)")
        # Worlds that shrink have groups of the same names, and other numbers for their ranks.
        self._name = "/".join(reversed(path))
        self._store = root
        self._room = root.room(self._name, tuple(map(options.peers.joined_as, options.ranks)))
        self._eager_bytes = eager_bytes()
        self._calls_made = 0

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        room = self._room
        # Those of collectives are all buffered: the limit is for users' messages.
        buffered = tag < 0 or array.nbytes <= self._eager_bytes
        message = _Message(self.options, room, array, dst, tag, buffered=buffered)
        with room.lock:
            if dst in room.faults and tag >= 0:
                message.check()
            receipt = room.boxes[dst].come(self.rank, tag)
            if receipt is not None:
                receipt.take(message)
            else:
                # A rank that waits for another message puts this one aside.
                if room.boxes[dst].asks(self.rank):
                    message.buffer()
                room.boxes[dst].keep(message, self.rank, tag)
        return message

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        room = self._room
        receipt = _Receipt(self.options, room, array, src, tag)
        with room.lock:
            message = room.boxes[self.rank].ask(receipt, src, tag)
            if message is not None:
                receipt.take(message)
            else:
                for other in room.boxes[self.rank].kept(src):
                    other.buffer()
                room.wake()
        return receipt

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        number, room = self._calls_made, self._room
        self._calls_made += 1
        with room.lock:
            room.calls[self.rank][number % 2] = number, signature, call_site()
            room.wake()
        arrival = _CheckIn(self.options, room, number)
        yield SetUpWait(arrival, self.options) if number == 0 else arrival
        calls = [calls[number % 2] for calls in room.calls]
        if len({made.compared for _, made, _ in calls}) > 1:
            raise DistBackendError(
                disagreement(
                    {rank: f"{made.text} at {site}" for rank, (_, made, site) in enumerate(calls)}, self.options.ranks
                )
            )

    def abort(self, reason: str) -> None:
        self._room.fail(self.rank, f"has failed: {reason}")

    def close(self) -> None:
        self._room.fail(self.rank, self.options.peers.farewell)
        if len(self._room.faults) == self.size:
            self._store.forget(self._name)
