"""What a backend is told of the group that it is created for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshdist.errors import DistBackendError
from meshdist.runtime.departure import Departure
from meshdist.runtime.rank_text import call_process, call_rank
from meshdist.store.interface import value_now
from meshdist.system.deadline import Deadline

if TYPE_CHECKING:
    from meshdist.runtime.peer_monitor import Peers
    from meshdist.runtime.waiting import Doorbells, WaitObserver
    from meshdist.store import Store


_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.016


class DeferredCleanup:
    """What peers may still use of this rank, in any of its groups: memory that a receiver has yet to open.

    Each is given back by a function, which returns False while a peer may need it.
    """

    def __init__(self) -> None:
        self._pending: list[Callable[[], bool]] = []

    def add(self, give_back: Callable[[], bool]) -> None:
        self._pending.append(give_back)

    def try_all(self) -> bool:
        """Give back what is not used any more; return whether that was all. Call it before more of the same is made."""
        for give_back in list(self._pending):
            if give_back():
                with suppress(ValueError):  # another thread was here as well
                    self._pending.remove(give_back)
        return not self._pending

    def wait(self, longest_s: float) -> None:
        """Give all back, as this rank leaves; after `longest_s` also what is still used."""
        deadline, pause, pause_s = Deadline(longest_s), threading.Event(), _SHORTEST_PAUSE_S
        while not self.try_all() and not deadline.expired():
            pause.wait(deadline.slice_s(pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._pending.clear()


class BackendOptions:
    """The group that a backend is created for.

    Attributes:
        name: The group's name, the same on all its ranks and different from all other groups.
        label: The group's name in errors and logs.
        store: Store of this group alone. `withdrawn/<rank>` holds how a rank left before it created a backend for the
            group.
        world_store: Store of the world, by which ranks of different groups exchange information.
        rank: This rank in the group.
        ranks: The global ranks of the group, in group order.
        timeout_s: Timeout of a call, in seconds.
        bells: The doorbells of this rank's threads.
        peers: The processes of the world.
        deferred_cleanup: What peers may still use of this rank, also after it has left the group.
        preconditions: Functions that return how a precondition of the group is violated, or None; for example, that all
            ranks made the same mesh. Checked during waits.
        observer: Observes long waits, if there are peers to wait for.
        pg_options: The user's options for the backend.
        shared_resources: Resources shared by the backends of this rank's groups, by name. The first backend that needs
            one creates it; its method `close` is called when the world ends.
        device_id: The user's device for the group, or else the world; None for that of the first array.
        line_of_earlier: Returns the line of a call of this rank that begins with a text and that a number of completed
            calls on the group have followed; see `FlightRecorder.line_of`.
    """

    # Not a dataclass: creating one takes longer than importing this module.
    def __init__(
        self,
        name: str,
        label: str,
        store: Store,
        world_store: Store,
        rank: int,
        ranks: tuple[int, ...],
        timeout_s: float,
        bells: Doorbells,
        peers: Peers,
        deferred_cleanup: DeferredCleanup,
        preconditions: Sequence[Callable[[], str | None]] = (),
        observer: WaitObserver | None = None,
        pg_options: Any = None,
        shared_resources: dict[str, Any] | None = None,
        device_id: Any = None,
        line_of_earlier: Callable[[str, int], str] = lambda text, num_later: "",
    ) -> None:
        self.name, self.label = name, label
        self.store, self.world_store = store, world_store
        self.rank, self.ranks = rank, ranks
        self.timeout_s = timeout_s
        self.bells, self.peers = bells, peers
        self.deferred_cleanup, self.preconditions = deferred_cleanup, preconditions
        self.observer = observer
        self.pg_options, self.device_id = pg_options, device_id
        self.shared_resources = {} if shared_resources is None else shared_resources
        self.line_of_earlier = line_of_earlier

    def check_preconditions(self) -> None:
        """Raise DistBackendError if a precondition of the group is violated."""
        for broken in filter(None, (precondition() for precondition in self.preconditions)):
            raise DistBackendError(broken, peer_failed=True)

    def number(self, rank: int) -> int:
        """Return the number of a rank in messages: its rank in the group, unless this is a part of a group."""
        return rank

    @property
    def ranks_in_messages(self) -> tuple[int, ...]:
        """The global ranks that `number` counts."""
        return self.ranks

    def call(self, rank: int) -> str:
        """Return a rank of the group as messages name it."""
        return call_rank(self.number(rank), self.ranks_in_messages)

    def describe(self, rank: int) -> str:
        """Return a rank of the group, with its process, as messages name it."""
        return call_process(self.number(rank), self.ranks_in_messages, self.peers.process(self.ranks[rank]))

    def hosts(self) -> list[list[int]]:
        """Return the ranks of each host, hosts in the order of their first ranks."""
        hosts: dict[str, list[int]] = {}
        for rank, card in enumerate(self.peers.cards(self.ranks)):
            hosts.setdefault(card.host, []).append(rank)
        return list(hosts.values())

    def remote_ranks(self) -> frozenset[int]:
        """Return the ranks of other hosts."""
        mine = self.peers.mine.host
        return frozenset(rank for rank, card in enumerate(self.peers.cards(self.ranks)) if card.host != mine)

    def gone(self, rank: int) -> Departure | None:
        """Return how a rank of the group has left; None if it has not."""
        key = withdrawn_key(rank)
        if self.store.check([key]):
            return Departure.decode(self.store.get(key))
        return self.peers.departure_of(self.ranks[rank])

    def waits_in_first_call(self, rank: int) -> bool:
        """Return whether a rank has reported that it waits in the set-up of this group."""
        wait = set_up_wait_of(self.ranks[rank], self.world_store)
        return wait is not None and wait[0] == self.name


def withdrawn_key(rank: int) -> str:
    """Return the key of a group's store under which a rank records that it has left."""
    return f"withdrawn/{rank}"


def set_up_key(rank: int) -> str:
    """Return the key of the world's store under which a rank, by its global number, reports a wait in a set-up."""
    return f"meeting/{rank}"


def set_up_wait_of(rank: int, world_store: Store) -> tuple[str, str, tuple[int, ...]] | None:
    """Return the name, the words and the ranks of the group in whose set-up a global rank waits, if it reports that."""
    report = value_now(world_store, set_up_key(rank))
    if report is None:
        return None
    import json  # loaded since this rank has joined

    name, text, ranks = json.loads(report)
    return name, text, tuple(ranks)
