"""BlockedWait: one wait of a blocked rank, which publishes it, reads of other blocked ranks, and raises a circle.

All ranks of a job may be blocked while one computes. So that they do not flood the store, a rank reads the less often
the more ranks there are, and the more it has to read.
"""

from __future__ import annotations

import json
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from meshdist.debug.blocked_rank import BlockedRank, describe, endless_wait
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.message_counts import Carried, Traffic, all_quiet, between, decode, encode
from meshdist.runtime.waiting import has_news
from meshdist.system.platform import start_thread

if TYPE_CHECKING:
    from meshdist.runtime.log import RankLog
    from meshdist.runtime.waiting import Waitable
    from meshdist.store import Store

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
# Of all ranks together, if all of them are blocked: a fifth of what the store answers.
_REQUESTS_PER_S = 2000
# So many keys in one request take twice as long as one.
_KEYS_OF_REQUEST = 16
_MOST_RANKS = 128
# What became of a wait, in the store.
_IN_CIRCLE, _ENDED = b"circle", b"ended"


@dataclass(frozen=True)
class Surroundings:
    """What a BlockedWait uses of its rank.

    Attributes:
        store: The store of the world.
        log: The rank's log.
        num_ranks: The number of ranks in the world.
        traffic: Reads what has arrived, and returns what this rank has sent and received.
    """

    store: Store
    log: RankLog
    num_ranks: int
    traffic: Callable[[], Traffic]


class _Seen(NamedTuple):
    """The wait of an awaited rank."""

    number: int
    num_counts: int
    traffic: dict[str, Carried]  # what it has counted of its traffic with this rank


class BlockedWait:
    """One wait of a blocked rank. Its thread reads and publishes; the waiting thread confirms, and raises.

    It ends as soon as any of `waitables` is ready. `groups` are the names of the groups of their calls, and `has_left`
    says whether an awaited rank has left one of these.
    """

    def __init__(
        self,
        blocked: BlockedRank,
        around: Surroundings,
        waitables: Sequence[Waitable],
        groups: Collection[str],
        has_left: Callable[[int], bool],
    ) -> None:
        self._blocked = blocked
        self._waitables = waitables
        self._groups = groups
        self._around = around
        self._store = around.store
        self._has_left = has_left
        self._traffic = around.traffic()
        self._published: tuple[dict[int, int], Traffic] | None = None  # what was confirmed, and the traffic
        self._there: set[int] = set()  # the ranks that have published something
        self._reached: set[int] = set()  # the blocked ranks that were found last
        self._requests = 0.0
        # The waits of the awaited ranks, replaced when they change, and those at the last look.
        self._seen: dict[int, _Seen] = {}
        self._looked: dict[int, _Seen] | None = None
        self._is_new = False  # whether the thread has read since this rank has compared its traffic
        self._confirmed: dict[int, int] = {}
        self._found, self._lowest = "", 0  # the circle in words, and the lowest rank that it names
        self._wake, self._answered = threading.Event(), threading.Event()
        self._asked = self._fails = self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"meshdist-deadlock-{blocked.rank}", daemon=True)
        with suppress(DistError):  # without another thread, the timeout ends the wait
            start_thread(self._thread)

    def is_for(self, waitables: Sequence[Waitable]) -> bool:
        """Return whether this wait goes on, for the same `waitables`."""
        mine = self._waitables
        return bool(mine) and len(mine) == len(waitables) and all(map(operator.is_, mine, waitables))

    def look(self) -> None:
        """Confirm the waits that have been read, if this one goes on."""
        self.raise_found()
        seen = self._seen
        if seen is self._looked and self._is_new:
            self._is_new = False
            self._confirm(seen)
        self._looked = seen

    def raise_found(self) -> None:
        """Raise the error of a circle, if there is one."""
        if self._found:
            raise self._deadlock()

    def _confirm(self, seen: dict[int, _Seen]) -> None:
        traffic = self._around.traffic()  # reads what has arrived; what it ends, `awaits` says afterwards
        if any(map(has_news, self._waitables)):  # also calls at which nobody has looked since those waits were read
            return
        if traffic != self._traffic:
            self._traffic = traffic
        quiet = {
            rank: one.number
            for rank, one in seen.items()
            if self._confirmed.get(rank) == one.number or all_quiet(between(traffic, rank, self._groups), one.traffic)
        }
        if quiet != self._confirmed:
            awaits, from_any = awaited_ranks(self._waitables)
            still = {*awaits} if from_any == self._blocked.from_any else set()
            self._confirmed = {rank: number for rank, number in quiet.items() if rank in still}
            self._wake.set()

    def proven(self, budget_s: float) -> DistBackendError | None:
        """Return the error of a circle, as the wait fails; None if there is none, and will be none with this wait."""
        if not self._found and self._confirmed and self._thread.is_alive():
            self._asked = self._fails = True
            self._wake.set()
            self._answered.wait(budget_s)
        return self._deadlock() if self._found else None

    def _deadlock(self) -> DistBackendError:
        """Return the error of a circle: its cause, and a line for each rank."""
        cause, _, lines = self._found.partition("\n")
        error = DistBackendError(cause, hang_report=lines)
        error.reporter = self._lowest if lines else None
        return error

    def withdraw(self, budget_s: float) -> None:
        """Mark the wait as ended, since the rank goes on without what it waits for; a circle may have been first."""
        if not self._found and not self._ended and self._thread.is_alive():
            self._asked = self._fails = True
            self._wake.set()
            self._answered.wait(budget_s)

    def end(self) -> None:
        self._ended = True
        self._waitables = ()  # release the arrays of the calls
        self._wake.set()

    @property
    def has_ended(self) -> bool:
        return self._ended

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended, and no longer publishes this wait."""
        return not self._thread.is_alive()

    def join(self, longest_s: float) -> None:
        """Wait until the thread has ended, after `end`."""
        if self._ended and self._thread.ident is not None:
            self._thread.join(longest_s)

    # ---- The thread

    def _run(self) -> None:
        try:
            pause_s = _SHORTEST_PAUSE_S
            while not self._ended:
                asked, self._requests = self._asked, 0.0
                self._find()
                if asked and not self._found and self._fails and self._mark(self._blocked, _ENDED) == _IN_CIRCLE:
                    self._find()  # another rank was first
                if self._found:  # the others of the circle read the record as well
                    break
                if asked:
                    self._answered.set()
                self._wake.wait(max(pause_s, self._requests * self._around.num_ranks / _REQUESTS_PER_S))
                self._wake.clear()
                pause_s = min(1.25 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._store.set(_key(self._blocked.rank), "")
        except Exception as error:  # the wait goes on until its timeout; if it needs the store, it notices its loss
            self._around.log.debug(
                "cannot look for ranks that wait for each other: %s: %s", type(error).__name__, error
            )
        finally:
            self._answered.set()

    def _find(self) -> None:
        """Read of the ranks that this one waits for, directly or not; note a circle."""
        self._publish()
        blocked = self._read_on()
        seen = {rank: one for rank in self._blocked.awaits if rank in blocked and (one := self._see(blocked[rank]))}
        if seen != self._seen:
            self._seen = seen
        self._is_new = True
        path = endless_wait(self._blocked.rank, blocked)
        if path and not self._ended and self._claim(one for one in path if not one.has_ended):
            self._lowest = min(one.rank for one in path)
            self._found = describe(path)

    def _claim(self, ranks: Iterable[BlockedRank]) -> bool:
        return all(self._mark(one, _IN_CIRCLE) == _IN_CIRCLE for one in ranks)

    def _publish(self) -> None:
        confirmed, traffic = self._confirmed, self._traffic
        if self._published is None or self._published != (confirmed, traffic):
            mine, changed = self._blocked, self._published is None or self._published[1] != traffic
            self._blocked = replace(mine, confirmed=confirmed, num_counts=mine.num_counts + (changed and bool(traffic)))
            publish(self._store, self._blocked, traffic if changed else {})
            self._published = confirmed, traffic
            self._requests += 2

    def _read_on(self) -> dict[int, BlockedRank]:
        """Return the blocked ranks: this one, those that it awaits, and from rank to rank what they have confirmed."""
        mine = self._blocked
        blocked, asked, front = {mine.rank: mine}, {mine.rank}, {*mine.awaits, *self._reached} - {mine.rank}
        while front and len(asked) < _MOST_RANKS:
            asked |= front
            new = self._read(front)
            blocked.update(new)
            front = {rank for one in new.values() for rank in one.confirmed} - asked
        self._reached = blocked.keys() - {mine.rank}
        return blocked

    def _read(self, ranks: Iterable[int]) -> dict[int, BlockedRank]:
        """Return those of some ranks that are blocked."""
        ranks = sorted(ranks)
        for rank in ranks:
            if rank not in self._there:
                self._requests += 1
                if self._store.check([_key(rank)]):  # from now on: keys are not deleted
                    self._there.add(rank)
        there = [rank for rank in ranks if rank in self._there]
        if not there:
            return {}
        self._requests += 1 + len(there) / _KEYS_OF_REQUEST
        texts = self._store.multi_get([_key(rank) for rank in there])
        return {rank: BlockedRank.decode(text) for rank, text in zip(there, texts, strict=True) if text}

    def _see(self, other: BlockedRank) -> _Seen | None:
        """Return the wait of an awaited rank; None if it may end that of this rank, has left, or begins another."""
        if other.may_end(self._blocked):
            return None
        last = self._seen.get(other.rank)
        if last is not None and (last.number, last.num_counts) == (other.number, other.num_counts):
            return last
        self._requests += 2
        if (last is None or last.number != other.number) and self._has_left(other.rank):
            return None
        traffic: dict[str, Carried] = {}
        if other.num_counts:
            self._requests += 1
            counted = json.loads(self._store.get(_traffic_key(other.rank)))
            if counted["number"] != other.number:
                return None
            traffic = between(decode(counted["traffic"]), self._blocked.rank, self._groups)
        return _Seen(other.number, other.num_counts, traffic)

    def _mark(self, blocked: BlockedRank, word: bytes) -> bytes:
        """Say what becomes of a wait, unless that has been said; return what was said first."""
        self._requests += 1
        return self._store.compare_set(f"debug/wait/{blocked.rank}/{blocked.number}", "", word)


def awaited_ranks(waitables: Sequence[Waitable]) -> tuple[tuple[int, ...], bool]:
    """Return the global ranks that a wait for any of `waitables` is for, and whether any one of them may end it.

    If not, all of them have to do something. There are none if that is not known.
    """
    if len(waitables) == 1 and (awaits := tuple(waitables[0].awaits())):
        return awaits, False
    awaits_each = [{*(one.awaits() or one.awaits_any())} for one in waitables]
    if not all(awaits_each):
        return (), False
    ranks = tuple(sorted(set().union(*awaits_each)))
    return ranks, len(ranks) > 1


def publish(store: Store, blocked: BlockedRank, traffic: Traffic) -> None:
    """Publish a blocked rank, and before that its traffic, unless that is empty."""
    if traffic:
        counted = {"number": blocked.number, "traffic": encode(traffic)}
        store.set(_traffic_key(blocked.rank), json.dumps(counted, separators=(",", ":")))
    store.set(_key(blocked.rank), blocked.encode())


def waits_of(store: Store, num_ranks: int) -> list[tuple[int, ...]]:
    """Return the global ranks that each of the blocked ranks awaits.

    Raises:
        DistError: The store is gone.
    """
    keys = [key for key in map(_key, range(min(num_ranks, _MOST_RANKS))) if store.check([key])]
    texts = store.multi_get(keys) if keys else []
    return [BlockedRank.decode(text).awaits for text in texts if text]


def publish_ended(ended: BlockedRank, around: Surroundings) -> None:
    """Publish a rank that has ended its phase, and reads nothing until the next.

    Raises:
        DistError: The store is gone.
    """
    held = {
        name: {rank: one._replace(is_held=True) for rank, one in carried.items()}
        for name, carried in around.traffic().items()
    }
    publish(around.store, replace(ended, num_counts=int(any(held.values()))), held)


def _key(rank: int) -> str:
    return f"debug/blocked/{rank}"


def _traffic_key(rank: int) -> str:
    return f"debug/traffic/{rank}"
