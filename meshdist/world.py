"""World: everything a rank has between init_process_group and destroy_process_group."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshdist.backends.base import Backend as Engine
from meshdist.backends.base import BackendOptions, withdrawn_key
from meshdist.backends.device_backends import backend_name, by_device
from meshdist.backends.registry import make_engine
from meshdist.current import current_slot
from meshdist.deadline import Deadline
from meshdist.debug.call_log import CallLog
from meshdist.debug.flight_recorder import DIRECTORY_VARIABLE, FlightRecorder
from meshdist.debug.levels import DebugLevel, get_debug_level
from meshdist.debug.log import RankLog
from meshdist.debug.vigil import Vigil
from meshdist.detour import Watcher
from meshdist.errors import DistError, DistStoreError
from meshdist.exits import AtExit
from meshdist.farewell import DESTROYED_GROUP, ENDED, LEFT_THE_WORLD, gave_up, in_words
from meshdist.group_names import GroupNames, few
from meshdist.joining import leave, say_farewell
from meshdist.last_will import leave_will
from meshdist.listeners import Listeners
from meshdist.peers import Card, Peers
from meshdist.process_group import DESTROYED, ProcessGroup
from meshdist.progress import Progress
from meshdist.shrunk_worlds import shrunk_store
from meshdist.store import PrefixStore, Store, TCPStore
from meshdist.waiting import Doorbells

if TYPE_CHECKING:
    from meshdist.debug.reach import Reach

_LAST_GOODBYE_S = 5.0


class World:
    """The state of one rank: its place, its store, its groups.

    Attributes:
        rank: The global rank.
        size: The number of ranks.
        backend_name: The backend of groups that name none.
        timeout_s: How long a call of a group may wait that says nothing else.
        store: The part of the store that belongs to this world.
        default_group: The group of all ranks.
        progress: Carries out async calls.
        log: The `meshdist` logger, with this rank in each record.
        recorder: What this rank has called of late.
        vigil: Looks after waits that last long.
        thread: The thread that the rank's calls come from, in most cases: that in which it joined.
        passes: How often each `breakpoint` was reached, by its line.
        endings: Called when this world ends: what was begun for it elsewhere.
        num_shrunk: How often it was shrunk to come to be what it is.
    """

    num_shrunk = 0

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str,
        timeout_s: float,
        store: Store,
        peers: Peers,
        bells: Doorbells,
        own_store: Store | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.backend_name = backend
        self.timeout_s = timeout_s
        self.store = store
        self._own_store = own_store
        self._peers = peers
        self._bells = bells
        self.progress = self._new_progress(bells)
        self.recorder = FlightRecorder()
        self.thread = threading.get_ident()
        self.passes: Counter[str] = Counter()
        self.endings: list[Callable[[], None]] = []
        self.log = RankLog(rank)
        self.vigil = Vigil(self, self._make_reach)
        self.progress.vigil = self.vigil
        self._groups: list[ProcessGroup] = []
        self.listeners = Listeners(self._groups, self._make_loggers)
        self.listeners.log_calls(get_debug_level() is DebugLevel.DETAIL)
        self._shared: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}
        self._names = GroupNames()
        self._premises: dict[str, list[Callable[[], str | None]]] = {}
        self._mesh_numbers: dict[str, Iterator[int]] = {}
        self._leftovers: list[Callable[[], bool]] = []
        self._commons: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._end: str | None = None
        card = peers.mine
        self.log.info("all ranks are there; this is rank %d of %d, pid %d on %s", rank, size, card.pid, card.host_name)
        everyone = tuple(range(size))
        self.default_group = self._make_group(everyone, backend, timeout_s, "world", "world")
        self._shared[everyone, backend] = self.default_group
        self._at_exit = AtExit(self._close_at_exit)

    def new_group(self, ranks: tuple[int, ...], backend: str, timeout_s: float, desc: str = "") -> ProcessGroup:
        """Return a new group of these global ranks, in this order."""
        with self._lock:
            return self._make_group(ranks, backend, timeout_s, self._names.next(ranks, "#"), desc)

    def shared_group(self, ranks: tuple[int, ...], backend: str | None = None, desc: str = "") -> ProcessGroup:
        """Return the group of exactly these global ranks in this order; made once for each list and backend."""
        key = ranks, backend_name(backend) if backend is not None else self.backend_name
        with self._lock:
            group = self._shared.get(key)
            if group is None:
                # Members may ask for their shared groups in any order, and call them what they like. The number: what a
                # destroyed group has left in the store is not for the next one.
                name = self._names.next(ranks, f"@{key[1]}#")
                group = self._shared[key] = self._make_group(*key, self.timeout_s, name, desc)
            return group

    def host_names(self) -> tuple[str, ...] | None:
        """Return the host name of every rank, in rank order."""
        return tuple(card.host_name for card in self._peers.cards(range(self.size)))

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        """Return what tells the hosts of some global ranks apart."""
        return [card.host for card in self._peers.cards(ranks)]

    @property
    def card(self) -> Card:
        """What the others know of this rank's process."""
        return self._peers.mine

    @property
    def ranks_are_processes(self) -> bool:
        """Whether this rank has its process for itself; it may be a thread instead, or none but a dry run."""
        return bool(self._bells.base)

    @property
    def groups(self) -> list[ProcessGroup]:
        """The groups that this rank holds."""
        with self._lock:
            return list(self._groups)

    def farewell_of(self, rank: int) -> str | None:
        """Return what a rank said as it left this world; None while it is there, or if it died without a word."""
        return self._peers.farewell_of(rank)

    def note_fault(self, cause: DistError) -> None:
        """Leave word of what this rank was doing as a call failed, where that is asked for."""
        if os.environ.get(DIRECTORY_VARIABLE):
            from meshdist.debug.dump import dump_fault

            dump_fault(self, str(cause))

    def num_groups(self) -> int:
        """Return how many groups this rank holds, that of all ranks among them."""
        with self._lock:
            return len(self._groups)

    def rest_on(self, group: ProcessGroup, premise: Callable[[], str | None]) -> None:
        """Have the next call of `group` fail if `premise` is found broken: a function that returns how, or None."""
        premises = self._premises.setdefault(group.name, [])
        if premise not in premises:
            premises.append(premise)
            if group.has_backend:  # which asks by itself only while it is set up
                group.ask_first(premise)

    def next_mesh(self, universe: str) -> int:
        """Return the number of this rank's next mesh in a universe, which is known by its name."""
        return next(self._mesh_numbers.setdefault(universe, itertools.count(1)))

    def make_engine(self, group: ProcessGroup, backend: str) -> Engine:
        """Return a new engine of one of the backends of `group`.

        Raises:
            DistBackendError: What the group rests on is broken, or the backend cannot be used here.
        """
        is_first = backend == next(iter(by_device(group.backend_name).values()))
        name = group.name if is_first else f"{group.name} by {backend}"
        options = BackendOptions(
            name=name,
            label=group.label,
            store=self._group_store(name),
            world_store=self.store,
            rank=group.rank(),
            ranks=group.ranks,
            timeout_s=group.timeout_s,
            bells=self._bells,
            peers=self._peers,
            leftovers=self._leftovers,
            premises=self._premises.setdefault(group.name, []),
            vigil=self.vigil,
            pg_options=group.pg_options,
            commons=self._commons,
            device_id=group.device_id if group.device_id is not None else self.default_group.device_id,
        )
        options.check_premises()
        self.log.info("group %r connects by backend %s", group.label, backend, extra={"group": group.label})
        return self._new_engine(backend, options)

    def drop(self, group: ProcessGroup, what: str = DESTROYED) -> None:
        """Close one group; `what` became of it."""
        with self._lock:
            self.check_holds(group)
            self._groups.remove(group)
            self._shared = {key: other for key, other in self._shared.items() if other is not group}
            self._premises.pop(group.name, None)
        self.tell_unmet(group, DESTROYED_GROUP)
        group.close(what)
        self.log.info("group %r %s", group.label, what)

    def holds(self, group: ProcessGroup) -> bool:
        """Return whether `group` is of this world, and not closed."""
        return group in self._groups

    def check_holds(self, group: ProcessGroup) -> None:
        """Raise ValueError if `group` is of another world, or closed."""
        if not self.holds(group):
            raise ValueError(f"{group!r} is not a group of this world, or was destroyed already")

    def end_block(self, group: ProcessGroup, error: BaseException | None) -> None:
        """Destroy `group` at the end of its block, which ended with `error`; it may have been destroyed inside."""
        with self._lock:
            if group not in self._groups or self._end is not None:
                return
        if error is not None:
            group.abort(f"rank {self.rank} left the block of the group with {in_words(error)}")
        if group is not self.default_group:
            self.drop(group)
            return
        if current_slot().world is self:
            current_slot().empty()
        self.close()

    def close(self, what: str = DESTROYED) -> None:
        """Close all groups, of which `what` became, and leave the store."""
        if self._peers.farewell == DESTROYED_GROUP:
            self._peers.farewell = LEFT_THE_WORLD
        self._close_groups(what)
        for common in self._commons.values():
            common.close()
        try:
            leave(self.store, self.rank, self.size, self._peers.farewell)
        except DistError as error:
            # The store may have gone with the rank or the launcher that held it; then nobody joins there again.
            self.log.debug("left without telling the store: %s", error)
        if self._own_store is not None:
            if isinstance(self._own_store, TCPStore) and self._own_store.is_master:
                self._wait_for_leavers()
            self._own_store.close()
        self.vigil.close()
        self._peers.close()
        self._bells.close()
        for end in self.endings:
            end()
        self.log.info("left the world of %d ranks", self.size)

    def abort(self, reason: str) -> None:
        """Tell the ranks of all groups that this one gives up."""
        self._peers.farewell = gave_up(reason)
        for group in self._groups:
            # Of the others, there may be hundreds, nobody has met this rank; who waits is told as it leaves the world.
            if group.has_backend:
                group.abort(reason)

    def disown(self, what: str) -> None:
        """In a process that was forked of the rank: be of no use, as `what` became of the groups, and say nothing."""
        self._end = what
        self._at_exit.cancel()
        for group in self._groups:
            group.disown(what)
        self.progress.disown(f"the group of the call {what}")
        self._peers.disown()
        for end in self.endings:
            end()

    def shrunk(self, keep: tuple[int, ...]) -> World:
        """End this world, and return that of the global ranks `keep`, numbered from 0 in this order.

        It stands in a part of this one's store. All of `keep` do this; nothing waits for them here.

        Raises:
            DistError: The store is gone; this world is as it was.
        """
        store = shrunk_store(self.store, keep)
        peers = self._peers.renumbered(keep, store)
        self._peers.farewell = LEFT_THE_WORLD
        leave(self.store, self.rank, self.size, LEFT_THE_WORLD)
        # The ranks that are excluded will not leave; those that stay may join anew with the store, and another size.
        self.store.set("over", "")
        self.vigil.close()
        self._close_groups("is of no more use: the world was shrunk, and its ranks have new numbers")
        self._peers.close()
        place = keep.index(self.rank), len(keep)
        if peers.mine.bells:
            leave_will(peers, store, place[0])
        group = self.default_group
        world = type(self)(*place, self.backend_name, group.timeout_s, store, peers, self._bells, self._own_store)
        world.num_shrunk = self.num_shrunk + 1
        world.endings = self.endings
        world._commons = self._commons
        self.listeners.move_to(world.listeners)
        return world

    def _new_progress(self, bells: Doorbells) -> Progress:
        return Progress(bells, f"meshdist-progress-{self.rank}")

    def _new_engine(self, backend: str, options: BackendOptions) -> Engine:
        return make_engine(backend, options)

    def _make_loggers(self) -> tuple[Watcher, ...]:
        from meshdist.debug.call_order import CallOrder

        return CallLog(self.log), CallOrder(self.store, self._groups)

    def _make_reach(self) -> Reach:
        from meshdist.debug.reach import StoreReach

        return StoreReach(self.store, self._peers, self.rank)

    def _close_groups(self, what: str) -> None:
        with self._lock:
            self._end = what
        for group in self._groups:
            group.close(what)
        self.progress.close()
        self._at_exit.cancel()

    def tell_unmet(self, group: ProcessGroup, what: str) -> None:
        """Say what became of this rank to those that may wait for it in the first call of `group`."""
        # Without a backend there is no other way to them.
        if not group.has_backend and group.size() > 1:
            # The first reason stands. Where there is no store any more, nobody waits either.
            with contextlib.suppress(DistError):
                self._group_store(group.name).compare_set(withdrawn_key(group.rank()), "", what)

    def _group_store(self, name: str) -> Store:
        return PrefixStore(f"group/{name}", self.store)

    def _wait_for_leavers(self) -> None:
        # The store ends with this rank. Ranks that still need it are given a moment, but not those that have ended.
        deadline = Deadline(_LAST_GOODBYE_S)
        staying = [rank for rank in range(self.size) if rank != self.rank]
        while staying and not deadline.expired():
            staying = [rank for rank in staying if not self._has_left(rank)]
            with contextlib.suppress(DistStoreError):
                self.store.wait([f"left/{rank}" for rank in staying], deadline.slice_s(0.1))

    def _has_left(self, rank: int) -> bool:
        ended = self._peers.card(rank).host == self._peers.mine.host and self._peers.ended(rank)
        return ended or self.store.check([f"left/{rank}"])

    def _close_at_exit(self, error: BaseException | None) -> None:
        self._peers.farewell = ENDED
        if error is not None:
            self.abort(f"it raised {in_words(error)}")
            # At once, for those who have no other way to hear of it: what is on its way may take a while to arrive.
            with contextlib.suppress(DistError):
                say_farewell(self.store, self.rank, self._peers.farewell)
        elif self.rank == 0 and not any(group.is_broken for group in self._groups):
            self.log.warning("the process ends without destroy_process_group(); call it when the ranks are done")
        self.close()

    def _make_group(self, ranks: tuple[int, ...], backend: str, timeout_s: float, name: str, desc: str) -> ProcessGroup:
        if self._end is not None:
            raise ValueError(f"group {name!r} cannot be made: its world {self._end}; make groups and meshes anew")
        group = ProcessGroup(self, ranks, name, desc or name, backend, timeout_s)
        self._groups.append(group)
        self.listeners.listen_to(group)
        if self.log.isEnabledFor(logging.INFO):
            self.log.info("group %r is made: %s, backend %s", group.label, few(ranks), backend)
        return group
