"""Number the ranks of a world that meet in a store, some or all of which do not say their rank.

Every process writes its arrival at the end of one list in the store, and everybody reads that list in the same way:
whoever contradicts an earlier one is refused, and once as many are there as the world has ranks, those who asked for
a rank have it and the others get the free ones, host by host. So all agree without a chairman.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from meshdist.deadline import Deadline
from meshdist.debug.log import RankLog
from meshdist.errors import DistError, DistStoreError, DistTimeoutError
from meshdist.init_urls import NOT_GIVEN
from meshdist.peers import host_id
from meshdist.shortfall import shortfall
from meshdist.store import PrefixStore, Store

_log = RankLog()
_SLICE_S = 1.0
_LOOK_S = 0.25
_NAMED = 20
_NAMED_REFUSALS = 3


@dataclass(frozen=True)
class Arrival:
    """A process that came to be numbered.

    Attributes:
        token: Tells it from any other.
        rank: The rank it asks for, NOT_GIVEN where it takes any.
        world_size: How many ranks it takes the world to have.
        host: Equal for processes of one host, which get neighbouring ranks.
        who: Its process and host, for people.

    Example:
        >>> Arrival.here(NOT_GIVEN, 4).world_size
        4
    """

    token: str
    rank: int
    world_size: int
    host: str
    who: str

    @classmethod
    def here(cls, rank: int, world_size: int) -> Arrival:
        """Return a new arrival of this process."""
        return cls(os.urandom(8).hex(), rank, world_size, host_id(), f"pid {os.getpid()} on {platform.node()}")


class Roster:
    """Who has come and gone, in the order of the list; the same for everybody who reads it.

    Args:
        all_or_none: Number nobody while there are objections.

    Attributes:
        came: All who were taken, those who gave up later included, by token.
        present: Those of them who are still there.
        refusals: Why the others were not taken, by token.
        refused: Who they are and why, for people.
        ranks: The rank of each token, once as many are there as the world has ranks.
        objections: Who of those that were refused was of this meeting, as long as it lasts: before all had a rank.

    Example:
        >>> roster = Roster()
        >>> for token, rank in (("a", NOT_GIVEN), ("b", 0)):
        ...     roster.arrive(Arrival(token, rank, 2, "host", "pid 1"))
        >>> roster.ranks
        {'b': 0, 'a': 1}
    """

    def __init__(self, *, all_or_none: bool = False) -> None:
        self._all_or_none = all_or_none
        self.came: dict[str, Arrival] = {}
        self.present: dict[str, Arrival] = {}
        self.refusals: dict[str, str] = {}
        self.refused: list[str] = []
        self.ranks: dict[str, int] = {}
        self.objections: list[str] = []

    @classmethod
    def read(cls, text: bytes, *, all_or_none: bool = False) -> Roster:
        """Return the roster that the list in the store makes."""
        roster = cls(all_or_none=all_or_none)
        for line in text.splitlines():
            entry = json.loads(line)
            if isinstance(entry, str):
                roster.leave(entry)
            else:
                roster.arrive(Arrival(**entry))
        return roster

    def arrive(self, arrival: Arrival) -> None:
        """Take one more, or refuse it."""
        refusal = self._refusal(arrival)
        if refusal is not None:
            self.refusals[arrival.token] = refusal
            self.refused.append(f"{arrival.who}: {refusal}")
            if self._all_or_none and self.present and not self.ranks:
                self.objections.append(self.refused[-1])
            return
        # Who gave up and comes again is one, not two.
        gone = (token for token, each in self.came.items() if token not in self.present and each.who == arrival.who)
        self.came.pop(next(gone, ""), None)
        self.came[arrival.token] = self.present[arrival.token] = arrival
        if len(self.present) == arrival.world_size and not self.objections:
            self._number(arrival.world_size)

    def leave(self, token: str) -> None:
        """Let one go; its rank is free again."""
        self.present.pop(token, None)
        self.ranks.pop(token, None)
        if not self.present:
            self.objections.clear()

    def _refusal(self, arrival: Arrival) -> str | None:
        if arrival.rank >= arrival.world_size:
            return f"rank must be between 0 and world_size - 1 = {arrival.world_size - 1}, got {arrival.rank}"
        for other in self.present.values():
            if other.world_size != arrival.world_size:
                return (
                    f"the other ranks say that the world size is {other.world_size}, this one says {arrival.world_size}"
                )
            if other.rank == arrival.rank != NOT_GIVEN or self.ranks.get(other.token) == arrival.rank:
                return (
                    f"rank {arrival.rank} is there already, {other.who}; give each process a rank of its own, or a new"
                    " place to meet if this one is left over from an earlier run"
                )
        if len(self.present) >= arrival.world_size:
            others = _listed(list(self.present.values()))
            return (
                f"the {arrival.world_size} ranks are there already ({others}); give jobs that meet in one place a"
                " group_name each, and end those left over from an earlier run"
            )
        return None

    def _number(self, world_size: int) -> None:
        # Who has a number keeps it, so that one who takes the place of another changes nobody else's.
        numbers = dict(self.ranks)
        numbers.update({token: each.rank for token, each in self.present.items() if each.rank != NOT_GIVEN})
        taken = set(numbers.values())
        free = (rank for rank in range(world_size) if rank not in taken)
        hosts = list(dict.fromkeys(each.host for each in self.present.values()))
        waiting = [each for each in self.present.values() if each.token not in numbers]
        for each in sorted(waiting, key=lambda each: hosts.index(each.host)):
            numbers[each.token] = next(free)
        self.ranks = numbers

    def shortfall(self, store: Store, world_size: int, when: str) -> str:
        """Return who came and how many are missing, for the message of a wait that was in vain."""
        came = list(self.came.values())
        if all(each.rank != NOT_GIVEN for each in came):
            ranks = {each.rank for each in came}
            missing = [rank for rank in range(world_size) if rank not in ranks]
            text = shortfall(store, world_size, missing, when)
        else:
            text = f"{_count(len(came))} joined {when} ({_listed(came)}); {max(1, world_size - len(came))} missing"
        return text + "".join(f"; refused: {words}" for words in self.refused[-_NAMED_REFUSALS:])


def _count(number: int) -> str:
    return f"{number} {'rank' if number == 1 else 'ranks'}"


def _listed(arrivals: Sequence[Arrival]) -> str:
    words = [each.who + (f", rank {each.rank}" if each.rank != NOT_GIVEN else "") for each in arrivals[:_NAMED]]
    return "; ".join(words) + ("; ..." if len(arrivals) > _NAMED else "")


def number_ranks(
    store: Store,
    rank: int,
    world_size: int,
    deadline: Deadline,
    pause: Callable[[], None] | None = None,
    *,
    all_or_none: bool = False,
) -> int:
    """Wait for all ranks of the world and return this process's rank.

    Args:
        store: Where they meet; no other world's.
        rank: The rank that this process is to have, or NOT_GIVEN for any.
        world_size: The number of ranks.
        deadline: When to give up.
        pause: What to do, for a short time, between two looks at who is there; wait on the store where None.
        all_or_none: Give up where another process was refused that came to be one of the ranks; else wait on for the
            right one.

    Raises:
        ValueError: Another process has this rank, says another world size, or all ranks are there already; or, with
            `all_or_none`, another process was refused.
        DistTimeoutError: Some did not come; says who did.
    """
    numbering = _Numbering(store, Arrival.here(rank, world_size), all_or_none)
    wait = pause or (lambda: numbering.wait(deadline.slice_s(_LOOK_S)))
    try:
        numbering.arrive()
        while (number := numbering.number()) is None:
            if deadline.expired():
                raise numbering.too_late(deadline)
            numbering.check_objections()
            numbering.warn()
            wait()
    except BaseException:
        numbering.leave()
        raise
    return number


class _Numbering:
    """One process's part in the numbering."""

    def __init__(self, store: Store, arrival: Arrival, all_or_none: bool) -> None:
        self._all_or_none = all_or_none
        self._store = PrefixStore("numbering", store)
        self._me = arrival
        self._num_warned = 0
        self._next_warning_s = time.monotonic() + _SLICE_S
        own = "" if arrival.rank == NOT_GIVEN else f"rank {arrival.rank} of "
        self._where = f"init_process_group ({own}{arrival.world_size}{'' if own else ' ranks'})"

    def arrive(self) -> None:
        self._store.append("arrivals", json.dumps(asdict(self._me)) + "\n")
        roster = self._roster()
        if self._me.token in roster.refusals:
            raise ValueError(f"{self._where}: {roster.refusals[self._me.token]}")
        if roster.ranks:
            self._store.set("complete", "")

    def number(self) -> int | None:
        return self._roster().ranks.get(self._me.token) if self._store.check(["complete"]) else None

    def check_objections(self) -> None:
        objections = self._roster().objections
        if objections:
            raise ValueError(f"{self._where}: refused {'; '.join(objections[:_NAMED_REFUSALS])}")

    def warn(self) -> None:
        """Say in the log who was refused since the last time, on the rank that came first."""
        if time.monotonic() < self._next_warning_s:
            return
        self._next_warning_s = time.monotonic() + _SLICE_S
        roster = self._roster()
        if next(iter(roster.present), None) == self._me.token:
            for words in roster.refused[self._num_warned :]:
                _log.warning("%s: refused %s", self._where, words)
            self._num_warned = len(roster.refused)

    def wait(self, longest_s: float) -> None:
        # Who is missing is told at the deadline, and what is wrong with the store by the next look.
        with suppress(DistStoreError):
            self._store.wait(["complete"], longest_s)

    def leave(self) -> None:
        # Where the store is gone nobody is left who would count this rank in.
        with suppress(DistError):
            self._store.append("arrivals", json.dumps(self._me.token) + "\n")

    def too_late(self, deadline: Deadline) -> DistTimeoutError:
        shortfall = self._roster().shortfall(self._store, self._me.world_size, f"within {deadline.timeout_s:.3g} s")
        return DistTimeoutError(f"{self._where}: {shortfall}")

    def _roster(self) -> Roster:
        return Roster.read(self._store.get("arrivals"), all_or_none=self._all_or_none)
