"""Backend `threads`: ranks that are threads of one process.

It implements what every backend must, messages and the comparison of calls, and runs every collective by its default
algorithm. Tests and notebooks run real meshes on it in milliseconds; it is not made for speed.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator

from meshdist.arrays import Array, describe_array
from meshdist.backends.base import Backend, BackendOptions
from meshdist.call import Signature, call_site
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError
from meshdist.store import HashStore, PrefixStore, Store
from meshdist.waiting import Doorbell, Waitable


class Room:
    """Where the ranks of one group meet: their messages, their calls, and who has given up."""

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.Lock()
        self.messages: dict[tuple[int, int, int], deque[Array]] = defaultdict(deque)
        # The last two calls of each rank: number, signature, file and line. No rank is two calls ahead of another.
        self.calls = [[(-1, "", "")] * 2 for _ in range(num_ranks)]
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
        """Return the room of a group, the same for all its ranks."""
        with self._room_lock:
            if name not in self._rooms:
                self._rooms[name] = ranks, Room(len(ranks))
                for rank, reason in self._ended.items():
                    self._announce(name, rank, reason)
            return self._rooms[name][1]

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

    def __init__(self, room: Room) -> None:
        self.room = room

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell
        with self.room.lock:
            self.room.sleepers.add(bell)

    def disarm(self) -> None:
        with self.room.lock:
            self.room.sleepers.discard(self._bell)


class _CheckIn(_InRoom):
    """All ranks have come to their call number `number`."""

    def __init__(self, room: Room, number: int) -> None:
        super().__init__(room)
        self._number = number

    def absent(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank, calls in enumerate(self.room.calls) if calls[self._number % 2][0] < self._number]

    def ready(self) -> bool:
        return not self.absent()

    def check(self) -> None:
        for rank in self.absent():
            if rank in self.room.faults:
                raise DistBackendError(f"rank {rank} {self.room.faults[rank]}", peer_failed=True)

    def missing(self) -> str:
        return ", ".join(f"rank {rank}" for rank in self.absent())


class _Receipt(_InRoom):
    """A message from a rank."""

    def __init__(self, room: Room, array: Array, source: tuple[int, int, int]) -> None:
        super().__init__(room)
        self._array = array
        self._source = source
        self._done = False

    def ready(self) -> bool:
        if not self._done:
            with self.room.lock:
                queue = self.room.messages.get(self._source)
                if not queue:
                    return False
                message = queue.popleft()
            if message.dtype != self._array.dtype or message.size != self._array.size:
                sent, expected = describe_array(message), describe_array(self._array)
                raise DistBackendError(
                    f"the message from rank {self._source[0]} is {sent}, the array to receive it {expected}"
                )
            self._array[...] = message.reshape(self._array.shape)
            self._done = True
        return True

    def check(self) -> None:
        rank = self._source[0]
        if rank in self.room.faults:
            raise DistBackendError(f"rank {rank} {self.room.faults[rank]}", peer_failed=True)

    def missing(self) -> str:
        return f"a message from rank {self._source[0]}"


class _Done(Waitable):
    """Nothing to wait for: messages are copied when they are posted."""

    def ready(self) -> bool:
        return True

    def check(self) -> None:
        return

    def arm(self, bell: Doorbell) -> None:
        return

    def disarm(self) -> None:
        return

    def missing(self) -> str:
        return "nobody"


class ThreadsBackend(Backend):
    """The threads of a group of ranks."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        root: Store = options.store
        while isinstance(root, PrefixStore):
            root = root.underlying_store
        if not isinstance(root, ThreadStore):
            raise ValueError("backend 'threads' is for ranks that are threads: use meshdist.run(fn, world_size)")
        self._room = root.room(options.name, options.ranks)
        self._calls_made = 0

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        with self._room.lock:
            self._room.messages[self.rank, dst, tag].append(array.copy())
            self._room.wake()
        return _Done()

    def recv(self, array: Array, src: int, tag: int) -> Waitable:
        return _Receipt(self._room, array, (src, self.rank, tag))

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        number, room = self._calls_made, self._room
        self._calls_made += 1
        with room.lock:
            room.calls[self.rank][number % 2] = number, signature.text, call_site()
            room.wake()
        yield _CheckIn(room, number)
        calls = [calls[number % 2] for calls in room.calls]
        if len({text for _, text, _ in calls}) > 1:
            raise DistBackendError(
                disagreement({rank: f"{text} at {site}" for rank, (_, text, site) in enumerate(calls)})
            )

    def abort(self, reason: str) -> None:
        self._room.fail(self.rank, f"has failed: {reason}")

    def close(self) -> None:
        self._room.fail(self.rank, "has destroyed the group")
