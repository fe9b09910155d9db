"""Counting in: ranks meet in the store before an engine is asked for what waits for all of them without a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshdist.farewell import peer_gone
from meshdist.store import Store
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

_LOOK_S = 0.1
# How many of those that have not come are looked after at each look.
_LOOKED_AFTER = 16


class Counted(Waitable):
    """Ranks of a group have all come to a place in the store, where each counts itself in.

    Args:
        options: The group's.
        store: The place.
        members: The ranks that are to come, as they are numbered in the group; this one is of them.
        card: What this rank says of itself.
        check: Raises where the engine has given up meanwhile.
    """

    def __init__(
        self, options: BackendOptions, store: Store, members: tuple[int, ...], card: str, check: Callable[[], None]
    ) -> None:
        self._options, self._store, self._members, self._check = options, store, members, check
        self._absent = [rank for rank in members if rank != options.rank]
        self._next_look_s = 0.0
        self._since_s = time.monotonic()
        store.set(f"here/{options.rank}", card)
        if store.add("num_here", 1) == len(members):
            store.set("all_here", "")

    def ready(self) -> bool:
        return self._store.check(["all_here"])

    def check(self) -> None:
        self._check()
        self._options.check_premises()
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        looked_after, self._absent = self._absent[:_LOOKED_AFTER], self._absent[_LOOKED_AFTER:]
        for rank in looked_after:
            if not self._store.check([f"here/{rank}"]):
                check_there(self._options, rank, "meeting the others")
                self._absent.append(rank)

    def arm(self, bell: Doorbell) -> None:
        return

    def disarm(self, bell: Doorbell) -> None:
        return

    def missing(self) -> str:
        absent = [rank for rank in self._members if not self._store.check([f"here/{rank}"])]
        return ", ".join(map(self._options.call, absent))

    def nap_s(self) -> float:
        # Nobody rings. Who waits long asks less often: thousands may be asking.
        return min(max((time.monotonic() - self._since_s) / 8, 1e-3), 50e-3)

    def cards(self) -> list[Any]:
        """Return what the ranks say of themselves, once all are there."""
        return [json.loads(card) for card in self._store.multi_get([f"here/{rank}" for rank in self._members])]


def check_there(options: BackendOptions, rank: int, left_out: str) -> None:
    """Raise DistBackendError if a rank of the group has gone away."""
    how = options.gone(rank)
    if how is not None:
        raise peer_gone(options.call(rank), how, left_out)
