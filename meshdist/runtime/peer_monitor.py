"""Peers and their monitor: the processes of the other ranks, and whether they are alive.

Processes of the same host are watched directly. For other hosts each rank leaves a last will with the store: the store
records the death of the rank when its connection ends. Connected peers see the socket close; the others poll the store,
as often as a `PeerMonitor` says.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from meshdist.errors import DistError
from meshdist.runtime.departure import Departure, PeerExit
from meshdist.runtime.host_identity import Card
from meshdist.runtime.log import RankLog
from meshdist.runtime.message_counts import Carrier, Traffic
from meshdist.store import PrefixStore, Store, TCPStore
from meshdist.store.tcp import connect_again
from meshdist.system.processes import ProcessWatch, fields_of


class Closable(Protocol):
    def close(self) -> None: ...
    def disown(self) -> None: ...  # In a forked child: release what peers can see, without notifying them


# In larger worlds, a rank reads the cards of its peers only when it needs them.
_MET_AT_ONCE = 64


class Peers:
    """The processes of the world's ranks; the store has their cards, under `card/<global rank>`."""

    def __init__(self, store: Store, card: Card, num_ranks: int) -> None:
        self.mine = card
        # The record that this rank leaves in the groups that it closes.
        self.departure = Departure(PeerExit.DESTROYED_GROUP)
        self.num_ranks = num_ranks
        self.carriers: dict[str, Carrier] = {}  # the transports whose messages may be under way, by name
        self._store = store
        self._cards: dict[int, Card] = {}
        self._watches: dict[int, ProcessWatch] = {}
        self._lock = threading.Lock()
        self._joined_as: Sequence[int] = range(num_ranks)
        self._lost: set[int] = set()
        self._shared: dict[str, Closable] = {}
        self._making = threading.Lock()
        self._noted: set[str] = set()

    def renumbered(self, ranks: Sequence[int], store: Store) -> Peers:
        """Return the peers of a shrunk world, which has `store` and numbers these ranks from 0 in this order."""
        peers = Peers(store, self.mine, len(ranks))
        peers._cards = dict(enumerate(self.cards(ranks)))
        peers._joined_as = [self._joined_as[rank] for rank in ranks]
        return peers

    def joined_as(self, rank: int) -> int:
        return self._joined_as[rank]

    def departure_of(self, rank: int) -> Departure | None:
        """Return the record that a global rank left in the store; None if there is none."""
        key = f"left/{rank}"
        return Departure.decode(self._store.get(key)) if self._store.check([key]) else None

    def card(self, rank: int) -> Card:
        card = self._cards.get(rank)
        if card is None:
            card = self._cards[rank] = Card.decode(self._store.get(f"card/{rank}"))
        return card

    def meet(self) -> None:
        """Read the cards of all ranks, unless there are very many: later the store may have ended with its rank."""
        if self.num_ranks <= _MET_AT_ONCE:
            self.cards(range(self.num_ranks))

    def cards(self, ranks: Sequence[int]) -> list[Card]:
        """Return the cards of several global ranks; unknown ones are read in one request."""
        unknown = [rank for rank in ranks if rank not in self._cards]
        if unknown:
            texts = self._store.multi_get([f"card/{rank}" for rank in unknown])
            self._cards.update(zip(unknown, map(Card.decode, texts), strict=True))
        return [self._cards[rank] for rank in ranks]

    def are_elsewhere(self) -> bool:
        """Return whether some ranks are on other hosts; True also for worlds too large to read all cards."""
        return self.num_ranks > _MET_AT_ONCE or any(
            card.host != self.mine.host for card in self.cards(range(self.num_ranks))
        )

    def once(self, name: str, make: Callable[[], Closable]) -> Any:
        """Return the resource that the groups of this world share under a name; made at first use, closed with it."""
        shared = self._shared.get(name)
        if shared is None:
            with self._making:
                shared = self._shared.get(name)
                if shared is None:
                    shared = self._shared[name] = make()
        return shared

    def traffic(self) -> Traffic:
        """Read what has arrived for this rank, and return what its transports have carried."""
        return {name: carrier.carried() for name, carrier in list(self.carriers.items())}

    def first_time(self, what: str) -> bool:
        """Return True at the first call for `what` in this world, for messages that are logged once."""
        is_first = what not in self._noted
        self._noted.add(what)
        return is_first

    def report_end(self, rank: int) -> None:
        """Note that the process of a global rank on another host has ended."""
        self._lost.add(rank)

    def ended(self, rank: int) -> bool:
        """Return True once the process of a global rank has ended; for other hosts, once that has been reported."""
        if rank in self._lost:
            return True
        watch = self._watches.get(rank)
        if watch is None:
            card = self.card(rank)
            if card.host != self.mine.host:
                return False
            with self._lock:
                watch = self._watches.get(rank)
                if watch is None:
                    watch = self._watches[rank] = ProcessWatch(card.pid, card.started)
        return watch.ended()

    def how_ended(self, rank: int) -> Departure:
        """Return how a global rank ended that left no record."""
        watch = self._watches.get(rank)
        return Departure.of_status(None if watch is None else watch.status())

    def nudge(self, rank: int) -> bool:
        """Ask a global rank by a signal to write its state; return whether it is on this host and alive."""
        card = self.card(rank)
        if sys.platform == "win32" or card.host != self.mine.host or card.pid == self.mine.pid or self.ended(rank):
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.kill(card.pid, signal.SIGURG)
            return True
        return False

    def is_stopped(self, rank: int) -> bool:
        return fields_of(self.card(rank).pid)[:1] in (["T"], ["t"])

    def stopped_here(self) -> list[int]:
        """Return the global ranks of this host that are stopped, among those whose cards are known."""
        here = [rank for rank, card in self._cards.items() if card.host == self.mine.host and card.pid != self.mine.pid]
        return sorted(filter(self.is_stopped, here))

    def describe(self, rank: int) -> str:
        return f"rank {rank} ({self.process(rank)})"

    def process(self, rank: int) -> str:
        card = self.card(rank)
        return f"pid {card.pid} on {card.host_name}"

    def disown(self) -> None:
        """In a forked child: release what peers would take for a sign that the rank is alive."""
        for shared in self._shared.values():
            shared.disown()
        self._shared.clear()

    def close(self) -> None:
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()


_TIMEOUT_S = 30.0
_log = RankLog()


def leave_will(peers: Peers, store: Store, rank: int) -> None:
    """Have the store record the death of this rank if it ends without leaving the world.

    Does nothing if all ranks are on one host, or if no other process has the store. The connection closes with `peers`.
    """
    if not peers.are_elsewhere():
        return
    key = f"left/{rank}"
    while isinstance(store, PrefixStore):
        key, store = f"{store.prefix}/{key}", store.underlying_store
    if not isinstance(store, TCPStore) or store.is_master:
        return
    try:
        # A connection for this purpose alone, since other store connections are closed and reopened.
        client = connect_again(store, _TIMEOUT_S)
        client.set_last_will({key: Departure(PeerExit.CUT_OFF).encode()})
    except DistError as error:
        _log.warning("ranks on other hosts may notice late that this rank has ended: %s", error)
        return
    peers.once("last will", lambda: client)


# Interval of checks in one wait. A check of one rank takes two requests to the store, 130 us of processor time on both
# sides of a 2-core machine: 1,000 ranks that each check one peer five times a second use a third of the store's core.
_CHECK_INTERVAL_S = 0.2
# Ranks per check: 2 ms.
_MOST_ASKED = 16


class PeerMonitor:
    """Paces the checks of one wait, so that a peer's end is noticed within a second without flooding the store."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._turn = 0

    def is_due(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + _CHECK_INTERVAL_S
        return True

    def turn(self, ranks: Sequence[int], most: int = _MOST_ASKED) -> list[int]:
        """Return the ranks to check now: all if they are few, else the next ones in turn."""
        if not ranks:
            return []
        first, count = self._turn % len(ranks), min(most, len(ranks))
        self._turn = first + count
        return [ranks[(first + step) % len(ranks)] for step in range(count)]
