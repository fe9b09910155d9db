"""Reach: how a rank gets to know what the others are in, whether they wait, compute, or are gone."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshdist.deadline import Deadline
from meshdist.debug.rank_state import rank_state
from meshdist.debug.states import RankSeen, parse_state
from meshdist.errors import DistError

if TYPE_CHECKING:
    from meshdist.peers import Peers
    from meshdist.store import Store
    from meshdist.world import World

RECORDS_SENT = 50
_MOST_RANKS = 512
_PAUSE_S = 0.01
_STORY = "debug/story"


class Reach(ABC):
    """The way of one rank to the states of the others."""

    @abstractmethod
    def publish(self, state: dict[str, Any], *, waits: bool) -> None:
        """Tell the others what this rank is in; `waits` if that does not change until it is taken back.

        What a rank was in as it gave up a call stays, for those who ask when it is gone.
        """

    @abstractmethod
    def retract(self, *, keeps_state: bool = False) -> None:
        """Take back what was told, as the wait is over; the state of this rank not, where it is its last."""

    @abstractmethod
    def gather(self, budget_s: float) -> tuple[dict[int, RankSeen], dict[int, str]]:
        """Return the states of the ranks that answer in time, and what is known of those that are gone or silent.

        Of those that gave up a call and are gone since, there are both: the state is their last.
        """

    def stopped(self) -> dict[int, str]:
        """Return what is known of the ranks that are stopped by a signal, as far as it shows without asking anybody."""
        return {}

    @abstractmethod
    def leader(self) -> int | None:
        """Return the lowest rank that waits, which speaks for all; None where there is none."""

    @abstractmethod
    def tell(self, story: str) -> None:
        """Leave what was found for the ranks that do not lead."""

    @abstractmethod
    def told(self) -> str:
        """Return what the leader has left; empty where there is nothing."""


class StoreReach(Reach):
    """By the store; ranks of this host that say nothing by themselves are asked by a signal.

    Args:
        store: The world's.
        peers: Its processes.
        rank: This rank; None for somebody who is none.
    """

    def __init__(self, store: Store, peers: Peers, rank: int | None) -> None:
        self._store = store
        self._peers = peers
        self._rank = rank
        self._pause = threading.Event()
        self._has_told = False

    def publish(self, state: dict[str, Any], *, waits: bool) -> None:
        self._store.set(f"debug/state/{self._rank}", json.dumps({**state, "waits": waits}))

    def retract(self, *, keeps_state: bool = False) -> None:
        if not keeps_state:
            self._store.delete_key(f"debug/state/{self._rank}")
        if self._has_told:
            self._has_told = False
            self._store.delete_key(_STORY)  # of this wait; nobody shall take it for that of the next

    def gather(self, budget_s: float, ranks: Sequence[int] | None = None) -> tuple[dict[int, RankSeen], dict[int, str]]:
        """Return what `Reach.gather` does, of some ranks; of all where None."""
        deadline = Deadline(budget_s)
        ranks = range(min(self._peers.num_ranks, _MOST_RANKS)) if ranks is None else ranks
        texts = {rank: self._text(rank) for rank in ranks}
        gone = {rank: what for rank in ranks if (what := self._gone(rank)) is not None}
        # What a rank says that computes is of the moment when it was asked.
        silent = [rank for rank in ranks if rank not in gone and rank != self._rank and not _waits(texts[rank])]
        silent = [rank for rank in silent if self._peers.nudge(rank)]
        stopped = [rank for rank in silent if self._peers.is_stopped(rank)]
        silent = [rank for rank in silent if rank not in stopped]
        while silent and not deadline.expired():
            self._pause.wait(deadline.slice_s(_PAUSE_S))
            new = {rank: self._text(rank) for rank in silent}
            silent = [rank for rank in silent if new[rank] in (None, texts[rank])]
            texts.update((rank, text) for rank, text in new.items() if text is not None)
        # Whom a signal does not find may have ended since. What is there of an earlier time holds for those who wait.
        gone.update((rank, self._gone(rank) or self._peers.why_silent(rank)) for rank in [*stopped, *silent])
        states = {
            rank: parse_state(json.loads(text), f"the state of rank {rank} in the store")
            for rank, text in texts.items()
            if text is not None
        }
        return {rank: state for rank, state in states.items() if state.outlasts or rank not in gone}, gone

    def stopped(self) -> dict[int, str]:
        return {rank: self._peers.why_silent(rank) for rank in self._peers.stopped_here()}

    def leader(self) -> int | None:
        for rank in range(min(self._peers.num_ranks, _MOST_RANKS)):
            if rank == self._rank or _waits(self._text(rank)):
                return rank
        return None

    def tell(self, story: str) -> None:
        self._store.set(_STORY, story)
        self._has_told = True

    def told(self) -> str:
        text = self._kept(_STORY)
        return "" if text is None else text.decode()

    def _text(self, rank: int) -> bytes | None:
        return self._kept(f"debug/state/{rank}")

    def _kept(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        with suppress(DistError):  # it may be taken back in this very moment
            return self._store.multi_get([key])[0]
        return None

    def _gone(self, rank: int) -> str | None:
        farewell = self._peers.farewell_of(rank)
        if farewell is None and self._peers.card(rank).host == self._peers.mine.host and self._peers.ended(rank):
            return self._peers.how_ended(rank)
        return farewell


def _waits(text: bytes | None) -> bool:
    return text is not None and b'"waits": true' in text[-32:]


class ThreadsReach(Reach):
    """Directly, where the ranks are threads of one process.

    Args:
        worlds: Returns the world of each rank that has one.
        rank: This rank.
    """

    def __init__(self, worlds: Callable[[], Mapping[int, World]], rank: int) -> None:
        self._worlds = worlds
        self._rank = rank

    def publish(self, state: dict[str, Any], *, waits: bool) -> None:
        return

    def retract(self, *, keeps_state: bool = False) -> None:
        return

    def gather(self, budget_s: float) -> tuple[dict[int, RankSeen], dict[int, str]]:
        states: dict[int, RankSeen] = {}
        gone: dict[int, str] = {}
        for rank, world in self._worlds().items():
            farewell = world.farewell_of(rank)
            if farewell is not None:
                gone[rank] = farewell
                last = world.vigil.last
                if last is not None:
                    states[rank] = parse_state(last, f"rank {rank}")
            else:
                states[rank] = parse_state(rank_state(world, "asked for", RECORDS_SENT), f"rank {rank}")
        return states, gone

    def leader(self) -> int | None:
        waiting: Sequence[int] = [rank for rank, world in self._worlds().items() if world.vigil.is_watching]
        return min(waiting, default=None)

    def tell(self, story: str) -> None:
        return

    def told(self) -> str:
        found = (world.vigil.latest for _, world in sorted(self._worlds().items()) if world.vigil.is_watching)
        return next(filter(None, found), "")
