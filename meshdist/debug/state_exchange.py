"""How a rank learns the states of the others: whether they wait, compute, or are gone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshdist.debug.dump import RECORDS_SENT, rank_state
from meshdist.debug.hang_watchdog import Finding, StateExchange, watchdog_of
from meshdist.debug.states import RankSnapshot, parse_state
from meshdist.runtime.departure import describe
from meshdist.store.interface import value_now
from meshdist.system.deadline import Deadline

if TYPE_CHECKING:
    from meshdist.groups.world import World
    from meshdist.runtime.peer_monitor import Peers
    from meshdist.store import Store

_MOST_RANKS = 512
_PAUSE_S = 0.01
_REPORT = "debug/report"
# The first byte of a rank's state in the store: whether it waits. The rest is JSON, which need not be parsed for that.
_WAITS, _COMPUTES = b"w", b"c"


class StoreStateExchange(StateExchange):
    """Exchanges states through the store; computing ranks on this host are asked by a signal.

    The rank is None for a process outside the world.
    """

    def __init__(self, store: Store, peers: Peers, rank: int | None) -> None:
        self._store = store
        self._peers = peers
        self._rank = rank
        self._pause = threading.Event()
        self._has_reported = False

    def publish(self, state: dict[str, Any], *, waits: bool) -> None:
        flag = _WAITS if waits else _COMPUTES
        self._store.set(f"debug/state/{self._rank}", flag + json.dumps(state).encode())

    def retract(self, *, keeps_state: bool = False) -> None:
        if not keeps_state:
            self._store.delete_key(f"debug/state/{self._rank}")
        if self._has_reported:
            self._has_reported = False
            self._store.delete_key(_REPORT)  # of this wait, not of the next

    def gather(
        self, budget_s: float, ranks: Sequence[int] | None = None
    ) -> tuple[dict[int, RankSnapshot], dict[int, str]]:
        """As `StateExchange.gather`, for some ranks; for all if None."""
        deadline = Deadline(budget_s)
        ranks = range(min(self._peers.num_ranks, _MOST_RANKS)) if ranks is None else ranks
        texts = {rank: self._text(rank) for rank in ranks}
        gone = {rank: state for rank in ranks if (state := self._gone(rank)) is not None}
        # Computing ranks are asked again: their states are of the moment when they were asked.
        silent = [rank for rank in ranks if rank not in gone and rank != self._rank and not _waits(texts[rank])]
        silent = [rank for rank in silent if self._peers.nudge(rank)]
        stopped = [rank for rank in silent if self._peers.is_stopped(rank)]
        silent = [rank for rank in silent if rank not in stopped]
        while silent and not deadline.expired():
            self._pause.wait(deadline.slice_s(_PAUSE_S))
            new = {rank: self._text(rank) for rank in silent}
            silent = [rank for rank in silent if new[rank] in (None, texts[rank])]
            texts.update((rank, text) for rank, text in new.items() if text is not None)
        # A rank that does not answer may have ended since. Older states are kept only for ranks that wait.
        gone.update((rank, self._gone(rank) or why_silent(self._peers, rank)) for rank in [*stopped, *silent])
        states = {
            rank: parse_state(json.loads(text[1:]), f"the state of rank {rank} in the store")
            for rank, text in texts.items()
            if text is not None
        }
        return {rank: state for rank, state in states.items() if state.outlasts or rank not in gone}, gone

    def stopped(self) -> dict[int, str]:
        return {rank: why_silent(self._peers, rank) for rank in self._peers.stopped_here()}

    def leader(self) -> int | None:
        for rank in range(min(self._peers.num_ranks, _MOST_RANKS)):
            if rank == self._rank or _waits(self._text(rank)):
                return rank
        return None

    def report(self, found: Finding) -> None:
        self._store.set(_REPORT, json.dumps(found._asdict()))
        self._has_reported = True

    def reported(self) -> Finding:
        text = self._value(_REPORT)
        return Finding() if text is None else Finding(**json.loads(text))

    def _text(self, rank: int) -> bytes | None:
        return self._value(f"debug/state/{rank}")

    def _value(self, key: str) -> bytes | None:
        return value_now(self._store, key)

    def _gone(self, rank: int) -> str | None:
        departure = self._peers.departure_of(rank)
        if departure is None and self._peers.card(rank).host == self._peers.mine.host and self._peers.ended(rank):
            departure = self._peers.how_ended(rank)
        return None if departure is None else describe(departure)


def _waits(text: bytes | None) -> bool:
    return text is not None and text[:1] == _WAITS


class ThreadStateExchange(StateExchange):
    """Reads the states directly where ranks are threads of one process; `worlds` returns the world of each.

    The thread `caller` waits for the ranks.
    """

    def __init__(self, worlds: Callable[[], Mapping[int, World]], rank: int, caller: int) -> None:
        self._worlds = worlds
        self._rank = rank
        self._caller = caller

    def harmless_threads(self) -> Collection[int]:
        return {self._caller, *(world.thread for world in self._worlds().values())}

    def publish(self, state: dict[str, Any], *, waits: bool) -> None:
        return

    def retract(self, *, keeps_state: bool = False) -> None:
        return

    def gather(self, budget_s: float) -> tuple[dict[int, RankSnapshot], dict[int, str]]:
        states: dict[int, RankSnapshot] = {}
        gone: dict[int, str] = {}
        for rank, world in self._worlds().items():
            departure = world.departure_of(rank)
            if departure is not None:
                gone[rank] = describe(departure)
                last = watchdog_of(world).last
                if last is not None:
                    states[rank] = parse_state(last, f"rank {rank}")
            else:
                states[rank] = parse_state(rank_state(world, "asked for", RECORDS_SENT), f"rank {rank}")
        return states, gone

    def leader(self) -> int | None:
        waiting: Sequence[int] = [rank for rank, world in self._worlds().items() if watchdog_of(world).is_watching]
        return min(waiting, default=None)

    def report(self, found: Finding) -> None:
        return

    def reported(self) -> Finding:
        watchdogs = (watchdog_of(world) for _, world in sorted(self._worlds().items()))
        return next((each.latest for each in watchdogs if each.is_watching and each.latest), Finding())


def why_silent(peers: Peers, rank: int) -> str:
    """Return why a global rank on this host does not answer to `Peers.nudge`."""
    card = peers.card(rank)
    if peers.is_stopped(rank):
        return f"is stopped by a signal; `kill -CONT {card.pid}` on {card.host_name} resumes it"
    from meshdist.debug.stack_without_gil import place_of_process

    place = place_of_process(card.pid)
    at = f", called at {place}" if place is not None else ""
    return f"did not respond: blocked in native code{at}"
