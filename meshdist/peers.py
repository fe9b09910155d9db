"""Peers: what a rank knows of the processes of the others, and whether they live.

Every rank leaves a card in the store when it joins. Two ranks are on one host, and can share memory, when boot id,
pid namespace and network namespace are equal; `MESHDIST_HOST_ID` overrides that, and `MESHDIST_DISABLE_SHM=1` makes
every rank a host of its own.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshdist.farewell import DESTROYED_GROUP, DIED
from meshdist.process_watch import ProcessWatch, fields_of, started_at
from meshdist.switches import DISABLE_SHM, switch

if TYPE_CHECKING:
    from meshdist.store import Store


@dataclass(frozen=True)
class Card:
    """How a rank is found by its peers.

    Attributes:
        host: Equal for ranks that can share memory.
        host_name: For people.
        pid: The process, in the pid namespace of the host.
        started: When the process started, in clock ticks; tells it from a later one of the same pid. 0 where unknown.
        bells: Base of the addresses of the rank's doorbells.
        network: Equal for ranks that reach each other by loopback addresses.
    """

    host: str
    host_name: str
    pid: int
    started: int
    bells: str
    network: str = ""

    def encode(self) -> str:
        """Return the card as it stands in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Card:
        """Return the card that `encode` made `text` of."""
        return cls(**json.loads(text))


def my_card(bells: str) -> Card:
    """Return the card of this process."""
    pid, started = os.getpid(), started_at(os.getpid())
    # Without shared memory, every rank is a host of its own.
    alone = f" {pid} {started}" if switch(DISABLE_SHM) else ""
    return Card(f"{host_id()}{alone}", platform.node(), pid, started, bells, network_id())


def host_id() -> str:
    """Return what ranks that can share memory have in common."""
    given = os.environ.get("MESHDIST_HOST_ID")
    if given:
        return given
    return _machine("pid", "net")


def network_id() -> str:
    """Return what ranks have in common that reach each other by loopback addresses."""
    return _machine("net")


def _machine(*namespaces: str) -> str:
    if sys.platform != "linux":
        return platform.node()
    own = [os.readlink(f"/proc/self/ns/{kind}") for kind in namespaces]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *own])


class Closable(Protocol):
    """Something that has to be closed."""

    def close(self) -> None:
        """Give back what it holds."""

    def disown(self) -> None:
        """In a process that was forked of the rank: give back what peers can see, and say nothing."""


# Of larger worlds, ranks ask for the cards of those that they have to do with.
_MET_AT_ONCE = 64


class Peers:
    """The processes of the world's ranks.

    Args:
        store: Holds the cards, under `card/<global rank>`.
        card: This process's own.
        num_ranks: How many there are.

    Attributes:
        farewell: What this rank says to those of a group that it closes.
    """

    def __init__(self, store: Store, card: Card, num_ranks: int) -> None:
        self.mine = card
        self.farewell = DESTROYED_GROUP
        self.num_ranks = num_ranks
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
        """Return what is known of some of the ranks, as the peers of a world of their own.

        Args:
            ranks: Their numbers here; there they are numbered from 0, in this order.
            store: The store of that world. The cards are those of this one.
        """
        peers = Peers(store, self.mine, len(ranks))
        peers._cards = dict(enumerate(self.cards(ranks)))
        peers._joined_as = [self._joined_as[rank] for rank in ranks]
        return peers

    def joined_as(self, rank: int) -> int:
        """Return the number that a global rank had when it joined: worlds that shrink number their ranks anew."""
        return self._joined_as[rank]

    def farewell_of(self, rank: int) -> str | None:
        """Return what a global rank said as it left the world; None as long as it is there, or died without a word."""
        key = f"left/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def card(self, rank: int) -> Card:
        """Return the card of a global rank."""
        card = self._cards.get(rank)
        if card is None:
            card = self._cards[rank] = Card.decode(self._store.get(f"card/{rank}"))
        return card

    def meet(self) -> None:
        """Ask for the cards of all ranks, unless there are very many: one that ends may take the store along."""
        if self.num_ranks <= _MET_AT_ONCE:
            self.cards(range(self.num_ranks))

    def cards(self, ranks: Sequence[int]) -> list[Card]:
        """Return the cards of several global ranks, those not known yet in one request."""
        unknown = [rank for rank in ranks if rank not in self._cards]
        if unknown:
            texts = self._store.multi_get([f"card/{rank}" for rank in unknown])
            self._cards.update(zip(unknown, map(Card.decode, texts), strict=True))
        return [self._cards[rank] for rank in ranks]

    def are_elsewhere(self) -> bool:
        """Return whether some are on other hosts; True as well where they are so many that they were not all met."""
        return self.num_ranks > _MET_AT_ONCE or any(
            card.host != self.mine.host for card in self.cards(range(self.num_ranks))
        )

    def once(self, name: str, make: Callable[[], Closable]) -> Any:
        """Return what the groups of this world share under a name; made when it is first asked for, closed with it."""
        shared = self._shared.get(name)
        if shared is None:
            with self._making:
                shared = self._shared.get(name)
                if shared is None:
                    shared = self._shared[name] = make()
        return shared

    def first_time(self, what: str) -> bool:
        """Return True the first time that it is asked of `what` in this world: what is said once is said then."""
        is_first = what not in self._noted
        self._noted.add(what)
        return is_first

    def report_end(self, rank: int) -> None:
        """Learn that the process of a global rank on another host has ended."""
        self._lost.add(rank)

    def ended(self, rank: int) -> bool:
        """Return True once the process of a global rank has ended: seen here on this host, reported of others."""
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

    def how_ended(self, rank: int) -> str:
        """Return how a global rank ended that did, and said nothing of it."""
        watch = self._watches.get(rank)
        return (watch and watch.how_ended()) or DIED

    def nudge(self, rank: int) -> bool:
        """Ask a global rank by a signal to say what it is in; return whether it is of this host, and lives."""
        card = self.card(rank)
        if sys.platform == "win32" or card.host != self.mine.host or card.pid == self.mine.pid or self.ended(rank):
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.kill(card.pid, signal.SIGURG)
            return True
        return False

    def is_stopped(self, rank: int) -> bool:
        """Return whether the process of a global rank on this host is stopped by a signal, and answers nothing."""
        return fields_of(self.card(rank).pid)[:1] in (["T"], ["t"])

    def stopped_here(self) -> list[int]:
        """Return the global ranks of this host that are stopped, of those that this one has to do with."""
        here = [rank for rank, card in self._cards.items() if card.host == self.mine.host and card.pid != self.mine.pid]
        return sorted(filter(self.is_stopped, here))

    def why_silent(self, rank: int) -> str:
        """Return what is known of a global rank on this host that does not answer to `nudge`."""
        pid = self.card(rank).pid
        if self.is_stopped(rank):
            return f"is stopped by a signal; `kill -CONT {pid}` on {self.card(rank).host_name} lets it go on"
        from meshdist.debug.frozen import place_of_process

        place = place_of_process(pid)
        at = f", called at {place}" if place is not None else ""
        return f"has not answered: it is inside something that does not come back to Python{at}"

    def describe(self, rank: int) -> str:
        """Return a global rank with its process and host, for messages."""
        return f"rank {rank} ({self.process(rank)})"

    def process(self, rank: int) -> str:
        """Return the process of a global rank, for messages."""
        card = self.card(rank)
        return f"pid {card.pid} on {card.host_name}"

    def disown(self) -> None:
        """In a process that was forked of the rank: let go of what the others would take for a sign of its life."""
        for shared in self._shared.values():
            shared.disown()
        self._shared.clear()

    def close(self) -> None:
        """Give back what is held to talk to the processes, and to watch them."""
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
