"""Assign ranks to the processes that meet in a store, some or all of which do not request a rank.

Every process appends its arrival to one list in the store, and all processes evaluate that list in the same way: an
arrival that contradicts an earlier one is refused; once as many are present as the world has ranks, requested ranks are
assigned as requested, and the others get the free ranks, host by host. So all agree without a coordinator.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from meshdist.bootstrap.join import joined, shortfall
from meshdist.bootstrap.url import NOT_GIVEN
from meshdist.errors import DistError, DistStoreError, DistTimeoutError
from meshdist.runtime.host_identity import host_id
from meshdist.runtime.log import RankLog
from meshdist.store import PrefixStore, Store
from meshdist.system.deadline import Deadline, Reminder
from meshdist.system.plurals import counted

_log = RankLog()
_SLICE_S = 1.0
_LOOK_S = 0.25
_NAMED = 20
_NAMED_REFUSALS = 3
_PREFIX, _ARRIVALS = "numbering", "arrivals"


class Arrival(NamedTuple):
    """A process that wants a rank."""

    token: str
    rank: int  # the requested rank, NOT_GIVEN for any
    world_size: int
    host: str  # equal for processes of one host, which get neighbouring ranks
    who: str  # its pid and host, for messages

    @classmethod
    def here(cls, rank: int, world_size: int) -> Arrival:
        return cls(os.urandom(8).hex(), rank, world_size, host_id(), _this_process())


class RankAssignment:
    """The state after all entries of the list, the same for every process that reads it.

    With `all_or_none`, no ranks are assigned while there are objections.
    """

    def __init__(self, *, all_or_none: bool = False) -> None:
        self._all_or_none = all_or_none
        self.came: dict[str, Arrival] = {}  # all accepted arrivals by token, including those that left later
        self.present: dict[str, Arrival] = {}  # those that have not left
        self.refusals: dict[str, str] = {}  # the reason of each refused arrival, by token
        self.refused: list[str] = []  # process and reason of each refused arrival, for messages
        self.ranks: dict[str, int] = {}  # the rank of each token, once as many are present as the world has ranks
        self.objections: list[str] = []  # the refused arrivals of this meeting, until all have a rank

    @classmethod
    def read(cls, text: bytes, *, all_or_none: bool = False) -> RankAssignment:
        """Return the state that the list in the store describes."""
        assignment = cls(all_or_none=all_or_none)
        for line in text.splitlines():
            entry = json.loads(line)
            if isinstance(entry, str):
                assignment.leave(entry)
            elif isinstance(entry, list):
                # It was refused by a file that others use, even if they have not arrived here yet.
                assignment._refuse(*entry, is_awaited=True)
            else:
                assignment.arrive(Arrival(**entry))
        return assignment

    def arrive(self, arrival: Arrival) -> None:
        refusal = self._refusal(arrival)
        if refusal is not None:
            self.refusals[arrival.token] = refusal
            self._refuse(arrival.who, refusal, is_awaited=bool(self.present))
            return
        # A process that left and comes again counts once.
        gone = (token for token, each in self.came.items() if token not in self.present and each.who == arrival.who)
        self.came.pop(next(gone, ""), None)
        self.came[arrival.token] = self.present[arrival.token] = arrival
        if len(self.present) == arrival.world_size and not self.objections:
            self._number(arrival.world_size)

    def _refuse(self, who: str, reason: str, *, is_awaited: bool) -> None:
        self.refused.append(f"{who}: {reason}")
        if self._all_or_none and is_awaited and not self.ranks:
            self.objections.append(self.refused[-1])

    def leave(self, token: str) -> None:
        """Remove a process; its rank is free again."""
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
                    f"rank {arrival.rank} has already joined ({other.who}); give each process its own rank, or a"
                    " new place to meet if this one is left over from an earlier run"
                )
        if len(self.present) >= arrival.world_size:
            others = _listed(list(self.present.values()))
            return (
                f"the {arrival.world_size} ranks have already joined ({others}); give jobs that meet in one place a"
                " group_name each, and end those left over from an earlier run"
            )
        return None

    def _number(self, world_size: int) -> None:
        # Assigned ranks stay, so that a replacement of one process does not renumber the others.
        numbers = dict(self.ranks)
        numbers.update({token: each.rank for token, each in self.present.items() if each.rank != NOT_GIVEN})
        taken = set(numbers.values())
        free = (rank for rank in range(world_size) if rank not in taken)
        hosts = list(dict.fromkeys(each.host for each in self.present.values()))
        waiting = [each for each in self.present.values() if each.token not in numbers]
        for each in sorted(waiting, key=lambda each: hosts.index(each.host)):
            numbers[each.token] = next(free)
        self.ranks = numbers

    def shortfall(self, store: Store, world_size: int, when: str, *, is_waiting: bool = False) -> str:
        """Return who came and how many are missing, for the message of a timeout, or of a wait that goes on."""
        came = list(self.came.values())
        if all(each.rank != NOT_GIVEN for each in came):
            ranks = {each.rank for each in came}
            missing = [rank for rank in range(world_size) if rank not in ranks]
            text = shortfall(store, world_size, missing, when, is_waiting=is_waiting)
        else:
            begin, end = ("", f" {when}") if is_waiting else (f" {when}", "")
            text = (
                f"{counted(len(came), 'rank')} {joined(len(came), is_waiting=is_waiting)}{begin} ({_listed(came)});"
                f" {max(1, world_size - len(came))} missing{end}"
            )
        return text + "".join(f"; refused: {words}" for words in self.refused[-_NAMED_REFUSALS:])


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

    The ranks meet in `store`, which no other world uses; `rank` is the requested one, or NOT_GIVEN for any. Between two
    polls, `pause` is called, or this waits on the store. With `all_or_none`, give up if a process of this meeting was
    refused; otherwise wait for the right one.

    Raises:
        ValueError: The rank is taken, the world sizes differ, or all ranks have already joined; or, with `all_or_none`,
            another process was refused.
        DistTimeoutError: Some did not arrive; the message names those that did.
    """
    numbering = _Numbering(store, Arrival.here(rank, world_size), all_or_none)
    wait = pause or (lambda: numbering.wait(deadline.slice_s(_LOOK_S)))
    try:
        numbering.arrive()
        while (number := numbering.number()) is None:
            if deadline.expired():
                raise numbering.too_late(deadline)
            numbering.check_objections()
            numbering.warn(deadline)
            wait()
    except BaseException:
        numbering.leave()
        raise
    return number


def refuse_this_process(store: Store, reason: str) -> None:
    """Tell the processes that meet in `store` why this one gets no rank, so that none waits for it."""
    PrefixStore(_PREFIX, store).append(_ARRIVALS, json.dumps([_this_process(), reason]) + "\n")


def _this_process() -> str:
    return f"pid {os.getpid()} on {platform.node()}"


class _Numbering:
    """One process's part in the assignment."""

    def __init__(self, store: Store, arrival: Arrival, all_or_none: bool) -> None:
        self._all_or_none = all_or_none
        self._store = PrefixStore(_PREFIX, store)
        self._me = arrival
        self._num_warned = 0
        self._reminder = Reminder()
        self._next_warning_s = time.monotonic() + _SLICE_S
        own = "" if arrival.rank == NOT_GIVEN else f"rank {arrival.rank} of "
        self._where = f"init_process_group ({own}{arrival.world_size}{'' if own else ' ranks'})"

    def arrive(self) -> None:
        self._store.append(_ARRIVALS, json.dumps(self._me._asdict()) + "\n")
        assignment = self._assignment()
        if self._me.token in assignment.refusals:
            raise ValueError(f"{self._where}: {assignment.refusals[self._me.token]}")
        if assignment.ranks:
            self._store.set("complete", "")

    def number(self) -> int | None:
        return self._assignment().ranks.get(self._me.token) if self._store.check(["complete"]) else None

    def check_objections(self) -> None:
        objections = self._assignment().objections
        if objections:
            raise ValueError(f"{self._where}: refused {'; '.join(objections[:_NAMED_REFUSALS])}")

    def warn(self, deadline: Deadline) -> None:
        """On the process that came first, log the processes refused since the last time, and now and then who came."""
        if time.monotonic() < self._next_warning_s:
            return
        self._next_warning_s = time.monotonic() + _SLICE_S
        assignment = self._assignment()
        if next(iter(assignment.present), None) == self._me.token:
            for words in assignment.refused[self._num_warned :]:
                _log.warning("%s: refused %s", self._where, words)
            self._num_warned = len(assignment.refused)
            waited_s = self._reminder.due_s()
            if waited_s is not None:
                words = assignment.shortfall(
                    self._store, self._me.world_size, f"(timeout in {deadline.remaining_s():.0f} s)", is_waiting=True
                )
                _log.warning("%s is still waiting after %.0f s: %s", self._where, waited_s, words)

    def wait(self, longest_s: float) -> None:
        # A timeout is reported by the caller, and an error of the store by the next poll.
        with suppress(DistStoreError):
            self._store.wait(["complete"], longest_s)

    def leave(self) -> None:
        # Without the store, no process counts this rank.
        with suppress(DistError):
            self._store.append(_ARRIVALS, json.dumps(self._me.token) + "\n")

    def too_late(self, deadline: Deadline) -> DistTimeoutError:
        shortfall = self._assignment().shortfall(self._store, self._me.world_size, f"within {deadline.timeout_s:.3g} s")
        return DistTimeoutError(f"{self._where}: {shortfall}")

    def _assignment(self) -> RankAssignment:
        return RankAssignment.read(self._store.get(_ARRIVALS), all_or_none=self._all_or_none)
