"""Arrivals: ranks wait for each other in the store, and a rank that has waited too long takes its arrival back.

Every arrival and every withdrawal is a record at the end of one value in the store. All ranks replay the records in the
same order: the ranks have met at the first record at which all are there, and later records have no effect. So a rank
that withdraws learns from the records before its own whether it is too late, and either all ranks have met or none. All
ranks have met equally often, so they know the key of the next meeting.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Protocol

from meshdist.runtime.departure import Departure, LeftOut, peer_gone
from meshdist.runtime.peer_monitor import PeerMonitor, Peers
from meshdist.runtime.waiting import WithoutBell
from meshdist.store import Store


class Options(Protocol):
    """A group: its BackendOptions."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def store(self) -> Store: ...
    @property
    def peers(self) -> Peers: ...
    def waits_in_first_call(self, rank: int) -> bool: ...
    def check_preconditions(self) -> None: ...


class Member(Protocol):
    """One rank of a group: its Backend."""

    rank: int
    size: int

    @property
    def options(self) -> Options: ...
    def check_open(self) -> None: ...
    def is_behind(self) -> bool: ...
    def describe(self, rank: int) -> str: ...
    def departure_of(self, rank: int) -> Departure | None: ...


class Arrivals(WithoutBell):
    """Wait for all ranks of a group.

    Args:
        backend: That of this rank.
        num_met: How often the ranks have met before.
        is_first: This rank has made no call on the group before.
    """

    def __init__(self, backend: Member, num_met: int, is_first: bool) -> None:
        self._backend = backend
        self._rank, self._size, self._store = backend.rank, backend.size, backend.options.store
        self._num_met = num_met
        self._is_first, self._is_behind = is_first, False
        self._records = Records(self._size)
        self._monitor = PeerMonitor()
        self._since_s = time.monotonic()
        self._store.append(_key(num_met), f"+{self._rank} ")

    def ready(self) -> bool:
        # A rank that has begun its next call will not come any more: the call that follows compares the two.
        return self._have_met() or self._is_behind or self._backend.is_behind()

    def _have_met(self) -> bool:
        if not self._records.have_met:
            self._records = Records(self._size, self._store.get(_key(self._num_met)).decode())
        return self._records.have_met

    def withdraw(self) -> bool:
        """Take the arrival back; return False if all ranks had met before that."""
        self._store.append(_key(self._num_met), f"-{self._rank} ")
        return not self._have_met()

    def forget_last(self) -> None:
        """Delete the records of the meeting before, which no rank reads any more once all have met again."""
        if self._num_met > 0 and self._rank == 0:
            with suppress(NotImplementedError):  # a store of the user's own
                self._store.delete_key(_key(self._num_met - 1))

    def check(self) -> None:
        backend, options = self._backend, self._backend.options
        backend.check_open()
        options.check_preconditions()
        absent = self._records.absent(self._rank)
        ended = [rank for rank in absent if options.peers.ended(options.ranks[rank])]
        for rank in ended or (self._monitor.turn(absent) if self._monitor.is_due() else ()):
            departure = backend.departure_of(rank)
            if departure is None and rank in ended:
                departure = options.peers.how_ended(options.ranks[rank])
            if departure is not None:
                raise peer_gone(backend.describe(rank), departure, LeftOut.CALL, rank=options.ranks[rank])
            # A rank that has begun the group's first call waits in its set-up until this one takes part.
            self._is_behind |= self._is_first and options.waits_in_first_call(rank)

    def missing(self) -> str:
        return ", ".join(map(self._backend.describe, self._records.absent(self._rank)))

    def poll_interval_s(self) -> float:
        # Nothing rings the doorbell. Poll less often in long waits: thousands may be polling.
        return min(max((time.monotonic() - self._since_s) / 8, 1e-3), 50e-3)


class Records:
    """What the records of a meeting of `size` ranks say; `text` has them, such as "+0 +2 -0 "."""

    def __init__(self, size: int, text: str = "") -> None:
        self._size = size
        self._arrived: dict[int, int] = {}  # rank -> place of the record, for those that are there
        self._left: dict[int, int] = {}
        self._num_arrivals = [0] * size
        self.have_met = False  # all ranks were there at once
        for place, record in enumerate(text.split()):
            rank = int(record[1:])
            if record[0] == "+":
                self._arrived[rank] = place
                self._num_arrivals[rank] += 1
                self.have_met = len(self._arrived) == size
                if self.have_met:
                    return
            elif self._arrived.pop(rank, None) is not None:
                self._left[rank] = place

    def absent(self, mine: int) -> list[int]:
        """Return the ranks that are not there, without those that gave up the same attempt as rank `mine` since."""
        away = [rank for rank in range(self._size) if rank != mine and rank not in self._arrived]
        since, attempt = self._arrived.get(mine, -1), self._num_arrivals[mine]
        never_came = [rank for rank in away if self._left.get(rank, -1) < since or self._num_arrivals[rank] < attempt]
        return never_came or away


def _key(number: int) -> str:
    return f"met/{number}"
