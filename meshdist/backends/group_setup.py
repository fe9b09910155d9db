"""The set-up of groups through their stores.

All ranks count themselves in (`StoreBarrier`) before a backend makes a call that waits for all of them without a
deadline. A rank that leaves reports it (`withdraw`) to the ranks that wait there.

The ranks of two groups may deadlock: those of a slice of a mesh and those of its transpose, for example, which has the
same ranks in a different order and is a different group. So a rank that has waited for a second in the set-up of a
group reports it in the world's store (`SetUpWait`), and a rank that times out reads these reports.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshdist.backends.backend_options import set_up_key, set_up_wait_of, withdrawn_key
from meshdist.errors import DistError
from meshdist.runtime.departure import Departure, LeftOut, peer_gone
from meshdist.runtime.peer_monitor import PeerMonitor
from meshdist.runtime.rank_text import call_rank, ranks_text
from meshdist.runtime.waiting import Waitable, WithoutBell, Wrapped
from meshdist.store import Store
from meshdist.system.platform import start_thread

if TYPE_CHECKING:
    from meshdist.backends.backend_options import BackendOptions


class StoreBarrier(WithoutBell):
    """Wait for members of a group, this rank among them, that count themselves in at a place in the store.

    Each leaves a `card`, data for the others. `check` raises if the backend has given up meanwhile.
    """

    def __init__(
        self, options: BackendOptions, store: Store, members: tuple[int, ...], card: str, check: Callable[[], None]
    ) -> None:
        self._options, self._store, self._members, self._check = options, store, members, check
        self._absent = [rank for rank in members if rank != options.rank]
        self._monitor = PeerMonitor()
        self._since_s = time.monotonic()
        store.set(f"here/{options.rank}", card)
        if store.add("num_here", 1) == len(members):
            store.set("all_here", "")

    def ready(self) -> bool:
        return self._store.check(["all_here"])

    def check(self) -> None:
        self._check()
        self._options.check_preconditions()
        if not self._monitor.is_due():
            return
        for rank in self._monitor.turn(self._absent):
            if self._store.check([f"here/{rank}"]):
                self._absent.remove(rank)
            else:
                check_there(self._options, rank, LeftOut.MEETING)

    def missing(self) -> str:
        return ", ".join(map(self._options.call, self._not_here()))

    def awaits(self) -> list[int]:
        return [self._options.ranks[rank] for rank in self._not_here()]

    def _not_here(self) -> list[int]:
        return [rank for rank in self._members if not self._store.check([f"here/{rank}"])]

    def poll_interval_s(self) -> float:
        # Nothing rings the doorbell. Poll less often in long waits: thousands may be polling.
        return min(max((time.monotonic() - self._since_s) / 8, 1e-3), 50e-3)

    def cards(self) -> list[Any]:
        """Return the data of all ranks, once all have arrived."""
        return [json.loads(card) for card in self._store.multi_get([f"here/{rank}" for rank in self._members])]


def check_there(options: BackendOptions, rank: int, left_out: LeftOut) -> None:
    """Raise DistBackendError if a rank of the group has left."""
    departure = options.gone(rank)
    if departure is not None:
        raise peer_gone(options.call(rank), departure, left_out, rank=options.ranks[rank])


# How long to wait for the store: the process that hosts it may be stopped.
_HEARD_S = 0.5


def withdraw(options: BackendOptions, rank: int, departure: Departure) -> None:
    """Record in the store how this rank leaves the group, if it has not yet; takes a moment at most."""

    def tell() -> None:
        # If the store is gone, no rank waits for this one.
        with suppress(DistError):
            options.store.compare_set(withdrawn_key(rank), "", departure.encode())

    thread = threading.Thread(target=tell, name="meshdist-withdraw", daemon=True)
    try:
        start_thread(thread)
    except DistError:
        tell()
    else:
        thread.join(_HEARD_S)


_PATIENCE_S = 1.0
_MOST_ASKED = 16


class SetUpWait(Wrapped):
    """A wait in the set-up of a group, reported in the world's store after a second."""

    def __init__(self, waitable: Waitable, options: BackendOptions) -> None:
        super().__init__(waitable)
        self._options = options
        self._since_s = time.monotonic()
        self._said = False

    def ready(self) -> bool:
        if not super().ready():
            return False
        if self._said:
            self._said = False
            with suppress(DistError):
                self._options.world_store.delete_key(set_up_key(self._options.ranks[self._options.rank]))
        return True

    def check(self) -> None:
        super().check()
        if not self._said and time.monotonic() - self._since_s > _PATIENCE_S:
            self._said = True
            options = self._options
            text = f"group {options.label!r} ({ranks_text(options.ranks)})"
            with suppress(DistError):  # the report only helps other ranks' messages
                words = json.dumps([options.name, text, options.ranks])
                options.world_store.set(set_up_key(options.ranks[options.rank]), words)

    def missing(self) -> str:
        # The missing ranks are reported even if the store is gone.
        with suppress(DistError):
            return f"{super().missing()}{self._elsewhere()}"
        return super().missing()

    def _elsewhere(self) -> str:
        options, found, are_reordered = self._options, [], False
        for place, rank in enumerate(options.ranks[:_MOST_ASKED]):
            wait = set_up_wait_of(rank, options.world_store)
            if wait is not None and wait[0] != options.name:
                _, text, ranks = wait
                found.append(f"; {call_rank(place, options.ranks)} waited meanwhile in the first call on {text}")
                are_reordered |= _are_reordered(ranks, options.ranks)
        advice = ", and groups whose ranks are in a different order are different groups" if are_reordered else ""
        return f"{''.join(found)}{advice}"


def _are_reordered(ranks: Sequence[int], others: Sequence[int]) -> bool:
    return tuple(ranks) != tuple(others) and sorted(ranks) == sorted(others)
