"""DeadlockDetector: proves that ranks wait for each other in a circle, so that they raise long before the timeout.

A rank that has waited for a second in a sync call, and does nothing else meanwhile, is blocked: only the awaited
ranks can end its wait. It publishes that as a BlockedRank, with the number of the wait, and reads what they have
published. If its wait then still goes on, it publishes the numbers of their waits as well: it has `confirmed` them.

Ranks of which each has confirmed the wait of the next, in a circle, wait for ever. Suppose that some of these waits
end, and that the wait of x is the first. It ends by something that the next rank, y, does. While y waits, it does
nothing, and its wait has not ended. What y did before it published its wait was there when x, having read of that wait,
looked again, and was not enough. So none of these waits ends. For that, a `Waitable` names in `awaits` only ranks that
must do something in a call of theirs, and only if what they do is seen at once, as in shared memory; it names none if
something may be under way.

A program may have phases, as a notebook has cells: none begins before all ranks have ended the last. A rank that has
ended its phase does nothing for those that have not, so a rank waits for ever that has confirmed that, directly or by
way of blocked ranks.

The proof uses no clock and no state of two ranks at one time. The second only keeps short waits free of its cost:
a thread, and some requests to the store.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import PurePath
from time import monotonic
from typing import TYPE_CHECKING

from meshdist.debug.stacks import own_threads
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.flight_recorder import COMPLETED, SEQUENCE, Record, facts_in, site_in
from meshdist.system.platform import start_thread

if TYPE_CHECKING:
    from meshdist.groups.world import World
    from meshdist.runtime.log import RankLog
    from meshdist.runtime.waiting import Waitable
    from meshdist.store import Store

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
# Awaited ranks that are asked about, and ranks in all: a circle goes through any of the awaited ones.
_MOST_AWAITED, _MOST_RANKS = 16, 128
_MOST_NAMED = 8
# Threads of libraries that make no calls.
_HARMLESS = ("tqdm.", "ipykernel.", "IPython.", "jupyter_core.", "jupyter_client.")


@dataclass(frozen=True)
class BlockedRank:
    """A rank whose wait only other ranks can end.

    Attributes:
        rank: Its global rank.
        number: The number of the wait among those of the rank.
        awaits: The global ranks that all have to do something, or the first of them.
        call: The call in which it waits, as messages name it.
        confirmed: The numbers of their waits after which this rank has found its own to go on, by rank.
        members: The ranks of the group of the call, in its order.
        phase: The number of its phase.
        has_ended: It is in no call: it has ended the phase.
    """

    rank: int
    number: int
    awaits: tuple[int, ...]
    call: str
    confirmed: dict[int, int] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    phase: int = 0
    has_ended: bool = False

    def encode(self) -> str:
        return json.dumps({**asdict(self), "confirmed": sorted(self.confirmed.items())})

    @classmethod
    def decode(cls, text: bytes) -> BlockedRank:
        fields = json.loads(text)
        fields["awaits"], fields["members"] = tuple(fields["awaits"]), tuple(fields["members"])
        return cls(**{**fields, "confirmed": dict(map(tuple, fields["confirmed"]))})


def endless_wait(rank: int, blocked: Mapping[int, BlockedRank]) -> list[BlockedRank]:
    """Return blocked ranks of which each has confirmed the wait of the next; none if the wait of `rank` may end.

    Either they are a circle with `rank`, from its lowest rank on; or they are `rank` and others, and the last has ended
    its phase.
    """
    paths = {rank: [blocked[rank]]}
    front = [rank]
    while front:
        path = paths[front.pop(0)]
        for following, number in sorted(path[-1].confirmed.items()):
            other = blocked.get(following)
            if other is None or other.number != number:
                continue
            if other.has_ended:
                if other.phase == blocked[rank].phase:
                    return [*path, other]
                continue
            if following == rank:
                lowest = min(range(len(path)), key=lambda place: path[place].rank)
                return path[lowest:] + path[:lowest]
            if following not in paths:
                paths[following] = [*path, other]
                front.append(following)
    return []


def describe(path: list[BlockedRank]) -> str:
    """Return the sentence that says why the ranks of an `endless_wait` wait."""
    if not path[-1].has_ended:
        return _describe_circle(path)
    mine, *_, last, ended = path if len(path) > 2 else (path[0], *path)
    words = f"rank {ended.rank} has ended its {ended.call}"
    if last is mine:
        return f"{words}, and this rank waits for it in {mine.call}"
    waits = f"for which rank {last.rank} waits in {last.call}, and this rank for rank {path[1].rank} in {mine.call}"
    return f"{words}, {waits}"


def _describe_circle(circle: list[BlockedRank]) -> str:
    steps = [
        f"rank {one.rank} waits for rank {other.rank} in {one.call}"
        for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    if len(steps) > _MOST_NAMED:
        steps[_MOST_NAMED - 1 : -1] = [f"and so on, {len(circle)} ranks in all"]
    orders = {one.members for one in circle}
    are_reordered = len({tuple(sorted(members)) for members in orders}) < len(orders)
    advice = "; groups whose ranks are in a different order are different groups" if are_reordered else ""
    return f"the ranks wait for each other, and none can go on: {'; '.join(steps)}{advice}"


class DeadlockDetector:
    """Makes the BlockedWaits of one rank; `harmless_threads` are the threads that make no calls of this rank."""

    def __init__(self, world: World, harmless_threads: Collection[int]) -> None:
        self._world = world
        self._harmless_threads = harmless_threads
        self._numbers = count(1)
        self._next_s = 0.0
        self._phase = 0
        self._wait: BlockedWait | None = None  # the last one

    def begin_phase(self, number: int) -> None:
        """Note that this rank begins a phase, which no rank does before all have ended the last."""
        self._phase = number

    def end_phase(self, what: str) -> None:
        """Tell ranks that wait for this one that it has ended its phase, `what`, and makes no call before they have.

        Raises:
            DistError: The store is gone.
        """
        if not self._may_do_more():
            ended = BlockedRank(self._world.rank, next(self._numbers), (), what, phase=self._phase, has_ended=True)
            publish(self._world.store, ended)

    def look(self, wait: BlockedWait | None, waitable: Waitable) -> BlockedWait | None:
        """Look at the wait of this thread, which has just found that it goes on.

        `wait` is the result of the last look at it; its `end` must be called.

        Raises:
            DistBackendError: This rank is in a circle of blocked ranks.
        """
        if wait is not None:
            wait.look(waitable)
            return wait
        if monotonic() < self._next_s:
            return None
        self._next_s = monotonic() + _SHORTEST_PAUSE_S
        awaits, record = tuple(waitable.awaits()), self._only_call()
        if not awaits or record is None or self._may_do_more():
            return None
        words, number = _words(record), next(self._numbers)
        members = next((group.ranks for group in self._world.groups if group.name == facts_in(record).group), ())
        blocked = BlockedRank(
            self._world.rank, number, awaits[:_MOST_AWAITED], words, members=members, phase=self._phase
        )
        self._wait = BlockedWait(self._world.store, blocked, self._world.log)
        return self._wait

    def close(self, longest_s: float) -> None:
        """Wait for the thread of the last wait, which has ended."""
        if self._wait is not None:
            self._wait.join(longest_s)

    def _only_call(self) -> Record | None:
        """Return the record of the call in progress; None if there are others."""
        in_progress = [record for record in self._world.recorder.records() if not record[COMPLETED]]
        return in_progress[0] if len(in_progress) == 1 else None

    def _may_do_more(self) -> bool:
        """Return whether something else of this rank goes on that may make calls, or complete some."""
        world = self._world
        return (
            not world.progress.is_idle
            or any(group.outstanding for group in world.groups)
            or bool(own_threads(self._harmless_threads, _HARMLESS))
        )


def _words(record: Record) -> str:
    facts = facts_in(record)
    kind = "message" if facts.is_message else "call"
    return f"{facts.text}, {kind} {record[SEQUENCE]} on {facts.label!r}, at {PurePath(site_in(record)[0]).name}"


class BlockedWait:
    """One wait of a blocked rank. Its thread reads and publishes; the waiting thread confirms, and raises."""

    def __init__(self, store: Store, blocked: BlockedRank, log: RankLog) -> None:
        self._store = store
        self._log = log
        self._blocked = blocked
        self._read: dict[int, int] = {}  # the numbers of the waits of the awaited ranks, replaced when they change
        # The numbers at the last look, and those that were followed by another look.
        self._looked: dict[int, int] | None = None
        self._confirmed: dict[int, int] = {}
        self._found = ""
        self._wake, self._answered = threading.Event(), threading.Event()
        self._asked = self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"meshdist-deadlock-{blocked.rank}", daemon=True)
        with suppress(DistError):  # without another thread, the timeout ends the wait
            start_thread(self._thread)

    def look(self, waitable: Waitable) -> None:
        if self._found:
            raise DistBackendError(self._found)
        read = self._read
        if read is self._looked and read is not self._confirmed and self._is_read_before(read):
            awaits = set(waitable.awaits())
            self._confirmed = read if awaits >= read.keys() else {r: n for r, n in read.items() if r in awaits}
            self._wake.set()
        self._looked = read

    def _is_read_before(self, read: dict[int, int]) -> bool:
        return any(self._confirmed.get(rank) != number for rank, number in read.items())

    def proven(self, budget_s: float) -> DistBackendError | None:
        """Return the error of a circle, as an awaited rank may have raised it first; None if there is none."""
        if not self._found and self._confirmed and self._thread.is_alive():
            self._asked = True
            self._wake.set()
            self._answered.wait(budget_s)
        return DistBackendError(self._found) if self._found else None

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    def join(self, longest_s: float) -> None:
        """Wait until the thread has ended, after `end`."""
        if self._ended and self._thread.ident is not None:
            self._thread.join(longest_s)

    def _run(self) -> None:
        try:
            publish(self._store, self._blocked)
            pause_s = _SHORTEST_PAUSE_S
            while not self._ended:
                asked = self._asked
                self._find()
                if self._found:  # the others of the circle read the record as well
                    break
                if asked:
                    self._answered.set()
                self._wake.wait(pause_s)
                self._wake.clear()
                pause_s = min(1.25 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._store.set(_key(self._blocked.rank), "")
        except Exception as error:  # the wait goes on until its timeout; if it needs the store, it notices its loss
            self._log.debug("a circle of ranks cannot be looked for: %s: %s", type(error).__name__, error)
        finally:
            self._answered.set()

    def _find(self) -> None:
        """Read of the ranks that this one waits for, directly or not; note a circle."""
        mine, confirmed = self._blocked, self._confirmed
        if confirmed != mine.confirmed:
            mine = self._blocked = replace(mine, confirmed=confirmed)
            publish(self._store, mine)
        blocked, front, asked = {mine.rank: mine}, list(mine.awaits), {mine.rank}
        while front and len(asked) < _MOST_RANKS:
            rank = front.pop(0)
            if rank in asked:
                continue
            asked.add(rank)
            other = self._of(rank)
            if other is not None:
                blocked[rank] = other
                front += other.awaits
        read = {rank: blocked[rank].number for rank in mine.awaits if rank in blocked}
        if read != self._read:
            self._read = read
        path = endless_wait(mine.rank, blocked)
        if path:
            self._found = describe(path)

    def _of(self, rank: int) -> BlockedRank | None:
        key = _key(rank)
        text = self._store.get(key) if self._store.check([key]) else b""
        return BlockedRank.decode(text) if text else None


def publish(store: Store, blocked: BlockedRank) -> None:
    store.set(_key(blocked.rank), blocked.encode())


def _key(rank: int) -> str:
    return f"debug/blocked/{rank}"
