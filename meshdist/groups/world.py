"""World: everything a rank has between init_process_group and destroy_process_group, and how to find it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from meshdist.backends.backend_options import BackendOptions, DeferredCleanup, withdrawn_key
from meshdist.backends.base import Backend
from meshdist.backends.device_backends import backend_name, by_device
from meshdist.backends.registry import make_engine
from meshdist.errors import DistError, DistStoreError
from meshdist.groups.hook_registry import HookRegistry
from meshdist.groups.membership import GroupNames
from meshdist.groups.process_group import DESTROYED, ProcessGroup
from meshdist.runtime import context
from meshdist.runtime.context import GroupLike, WorldSlot, current_slot
from meshdist.runtime.departure import Departure, PeerExit, gave_up, giving_up
from meshdist.runtime.flight_recorder import FlightRecorder
from meshdist.runtime.hooks import CallObserver
from meshdist.runtime.log import RankLog
from meshdist.runtime.progress import Progress
from meshdist.runtime.rank_text import ranks_text
from meshdist.runtime.waiting import Doorbells, WaitObserver
from meshdist.store.interface import Store
from meshdist.store.prefix import PrefixStore
from meshdist.system.deadline import Deadline
from meshdist.system.plurals import counted
from meshdist.system.processes import AtExit

if TYPE_CHECKING:
    from meshdist.runtime.host_identity import Card
    from meshdist.runtime.peer_monitor import Peers

# How long a rank that leaves waits for others that still need it.
_LEAVE_TIMEOUT_S = 5.0
# How long a rank that raises waits for what it has in progress, such as a save of a checkpoint.
_FINISH_TIMEOUT_S = 30.0


class HangObserver(WaitObserver, Protocol):
    def close(self) -> None: ...


class Instrumentation(Protocol):
    """The debugging tools of a world; `lifecycle` passes them in."""

    def observer(self, world: World) -> HangObserver: ...  # Return the observer of the waits of a new world
    def logs_calls(self) -> bool: ...  # Return whether every call is logged, and compared between the ranks
    def loggers(self, world: World) -> tuple[CallObserver, ...]: ...  # Return the observers that log and compare calls

    def note_fault(self, world: World, reason: str) -> None:
        """Write down the state of the rank after a failed call, if that is enabled; never raise."""

    def note_interrupt(self, world: World) -> None:
        """Print what a rank was doing when Ctrl-C interrupted its call, unless its launcher does."""


class World:
    """The state of one rank: its place, its store, its groups."""

    num_shrunk = 0  # how often the world was shrunk
    raised: tuple[BaseException, float] | None = None  # with what this rank ends, and when, in seconds since 1970

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str,
        timeout_s: float,
        store: Store,
        peers: Peers,
        bells: Doorbells,
        own_store: Store | None,
        instrumentation: Instrumentation,
    ) -> None:
        self.rank = rank
        self.size = size
        self.backend_name = backend  # the default backend of groups
        self.timeout_s = timeout_s  # the default timeout of groups
        self.store = store  # the part of the store that belongs to this world
        self._own_store = own_store
        self.peers = peers  # the processes of its ranks
        self._bells = bells
        self.progress = self._new_progress(bells)  # carries out async calls
        self.recorder = FlightRecorder()  # the last calls of this rank
        self.thread = threading.get_ident()  # the thread that joined, from which most calls come
        self.passes: Counter[str] = Counter()  # how often each `breakpoint` was reached, by its line
        self.endings: list[Callable[[], None]] = []  # called when this world ends, to undo what was set up outside it
        self.last_calls: list[Callable[[], None]] = []  # called once or twice before this rank leaves
        self.log = RankLog(rank)  # the `meshdist` logger, with this rank in each record
        self._diagnosis = instrumentation
        self.observer = self.progress.observer = instrumentation.observer(self)
        self._groups: list[ProcessGroup] = []
        self._closing: list[ProcessGroup] = []  # that are not in `_groups` any more, and wait for their last messages
        self.hook_registry = HookRegistry(self._groups, lambda: instrumentation.loggers(self))
        self.hook_registry.log_calls(instrumentation.logs_calls())
        self._shared: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}
        self._names = GroupNames()
        self._preconditions: dict[str, list[Callable[[], str | None]]] = {}
        self._mesh_numbers: dict[str, Iterator[int]] = {}
        self._deferred_cleanup = DeferredCleanup()
        self._shared_resources: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._end: str | None = None
        card = peers.mine
        where = card.host_name
        self.log.info("all ranks have joined; this is rank %d of %d, pid %d on %s", rank, size, card.pid, where)
        everyone = tuple(range(size))
        self.default_group = self._make_group(everyone, backend, timeout_s, "world", "world")
        self._shared[everyone, backend] = self.default_group
        self._at_exit = AtExit(self._close_at_exit)

    def new_group(self, ranks: tuple[int, ...], backend: str, timeout_s: float, desc: str = "") -> ProcessGroup:
        with self._lock:
            return self._make_group(ranks, backend, timeout_s, self._names.next(ranks, "#"), desc)

    def shared_group(self, ranks: tuple[int, ...], backend: str | None = None, desc: str = "") -> ProcessGroup:
        """Return the group of these global ranks in this order; made once for each list and backend."""
        key = ranks, backend_name(backend) if backend is not None else self.backend_name
        with self._lock:
            group = self._shared.get(key)
            if group is None:
                # Members may request their shared groups in any order, with any descriptions. The name is numbered
                # because the store still has the keys of destroyed groups.
                name = self._names.next(ranks, f"@{key[1]}#")
                group = self._shared[key] = self._make_group(*key, self.timeout_s, name, desc)
            return group

    def host_names(self) -> tuple[str, ...] | None:
        return tuple(card.host_name for card in self.peers.cards(range(self.size)))

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        return [card.host for card in self.peers.cards(ranks)]

    @property
    def card(self) -> Card:
        return self.peers.mine

    @property
    def ranks_are_processes(self) -> bool:
        """Whether each rank is a process of its own, and neither a thread nor a dry run."""
        return bool(self._bells.base)

    @property
    def groups(self) -> list[ProcessGroup]:
        """The groups that are not closed."""
        with self._lock:
            return self._groups + self._closing

    def departure_of(self, rank: int) -> Departure | None:
        return self.peers.departure_of(rank)

    def note_fault(self, cause: DistError) -> None:
        self._diagnosis.note_fault(self, str(cause))

    def note_interrupt(self) -> None:
        self._diagnosis.note_interrupt(self)

    def num_groups(self) -> int:
        with self._lock:
            return len(self._groups)

    def add_precondition(self, group: ProcessGroup, precondition: Callable[[], str | None]) -> None:
        """Make the next call of `group` fail if `precondition` returns what is broken, and not None."""
        preconditions = self._preconditions.setdefault(group.name, [])
        if precondition not in preconditions:
            preconditions.append(precondition)
            if group.has_backend:  # a backend checks preconditions only while it is set up
                group.check_precondition(precondition)

    def next_mesh(self, universe: str) -> int:
        """Return the number of this rank's next mesh in the universe of this name."""
        return next(self._mesh_numbers.setdefault(universe, itertools.count(1)))

    def make_backend(self, group: ProcessGroup, backend: str) -> Backend:
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
            peers=self.peers,
            deferred_cleanup=self._deferred_cleanup,
            preconditions=self._preconditions.setdefault(group.name, []),
            observer=self.observer,
            pg_options=group.pg_options,
            shared_resources=self._shared_resources,
            device_id=group.device_id if group.device_id is not None else self.default_group.device_id,
            line_of_earlier=partial(self.recorder.line_of, group.name),
        )
        options.check_preconditions()
        self.log.info("connecting group %r with backend %s", group.label, backend, extra={"group": group.label})
        return self._new_backend(backend, options)

    def drop(self, group: ProcessGroup, what: str = DESTROYED) -> None:
        """Close one group; later calls raise with `what` became of it."""
        with self._lock:
            self.check_holds(group)
            self._groups.remove(group)
            self._closing.append(group)
            self._shared = {key: other for key, other in self._shared.items() if other is not group}
            self._preconditions.pop(group.name, None)
        self.announce_departure(group, Departure(PeerExit.DESTROYED_GROUP))
        try:
            group.close_as(what)
        finally:
            self._closing.remove(group)
        self.log.info("group %r %s", group.label, what)

    def holds(self, group: ProcessGroup) -> bool:
        return group in self._groups

    def check_holds(self, group: ProcessGroup) -> None:
        if not self.holds(group):
            raise ValueError(f"{group!r} is not a group of this world, or has already been destroyed")

    def end_block(self, group: ProcessGroup, error: BaseException | None) -> None:
        """Destroy `group` at the end of its `with` block, which ended with `error`, unless it was destroyed inside."""
        with self._lock:
            if group not in self._groups or self._end is not None:
                return
        if error is not None:
            if group is self.default_group:
                self.end_with(error)
            group.give_up(giving_up(f"rank {self.rank} left the block of the group with", error))
        if group is not self.default_group:
            self.drop(group)
            return
        if current_slot().world is self:
            current_slot().empty()
        self.close()

    def finish(self) -> None:
        """Let what still runs on groups of this world come to its end, before this rank leaves.

        Raises:
            Exception: What failed, such as an asynchronous save; once.
        """
        for call in self.last_calls:
            call()

    def finish_after_error(self) -> None:
        """Like `finish`, for a rank that raised: wait for a limited time, and log what failed.

        Call it before the other ranks are told of the error, since their calls fail then.
        """
        if self.last_calls:
            finishing = threading.Thread(target=self._finish_and_log, name="meshdist-finish", daemon=True)
            finishing.start()
            finishing.join(_FINISH_TIMEOUT_S)

    def _finish_and_log(self) -> None:
        for call in self.last_calls:
            try:
                call()
            except Exception as error:  # the program has ended, or has an error of its own
                self.log.error("failed as this rank left: %s", error)

    def close(self, what: str = DESTROYED) -> None:
        """Close all groups and leave the store; later calls raise with `what` became of the groups."""
        if self.raised is not None:
            self._diagnosis.note_fault(self, "raised")
        self._finish_and_log()
        if self.peers.departure.exit is PeerExit.DESTROYED_GROUP:
            self.peers.departure = Departure(PeerExit.LEFT_WORLD)
        self._close_groups(what)
        self._deferred_cleanup.wait(_LEAVE_TIMEOUT_S)
        for resource in self._shared_resources.values():
            resource.close()
        from meshdist.bootstrap.join import leave  # loaded since this rank has joined

        try:
            leave(self.store, self.rank, self.size, self.peers.departure)
        except DistError as error:
            # The store may have ended with its rank or launcher; then no rank can join there again.
            self.log.debug("left without telling the store: %s", error)
        if self._own_store is not None:
            if self._own_store.is_master:
                self._wait_for_leavers()
            self._own_store.close()
        self.observer.close()
        self.peers.close()
        self._bells.close()
        for end in self.endings:
            end()
        self.raised = None  # its traceback would keep arrays alive
        self.log.info("left the world of %s", counted(self.size, "rank"))

    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """Tell the ranks of all groups that this one gives up, for `reason` and because of `cause`."""
        if cause is not None:
            self.end_with(cause)
        error = giving_up(reason, cause)
        self.peers.departure = gave_up(error)
        for group in self._groups:
            # Groups without a backend may be hundreds; their ranks get the record when this rank leaves the world.
            if group.has_backend:
                group.give_up(error)

    def end_with(self, error: BaseException) -> None:
        """Note the exception with which this rank ends, for the flight recorder; that of a failed call is in there."""
        if not (isinstance(error, DistError) and any(group.is_broken for group in self._groups)):
            self.raised = error, time.time()

    def disown(self, what: str) -> None:
        """In a forked child: detach silently; calls raise with `what` became of the groups."""
        self._end = what
        self._at_exit.cancel()
        for group in self._groups:
            group.disown(what)
        self.progress.disown(f"the group of the call {what}")
        self.peers.disown()
        for end in self.endings:
            end()

    def shrunk(self, keep: tuple[int, ...]) -> World:
        """End this world and return that of the global ranks `keep`, numbered from 0 in this order.

        All ranks of `keep` call this, without waiting for each other. The new world has a part of this one's store.

        Raises:
            DistError: The store is gone; this world is unchanged.
        """
        from meshdist.bootstrap.join import leave, shrunk_store
        from meshdist.runtime.peer_monitor import leave_will

        store = shrunk_store(self.store, keep)
        peers = self.peers.renumbered(keep, store)
        self.peers.departure = Departure(PeerExit.LEFT_WORLD)
        leave(self.store, self.rank, self.size, self.peers.departure)
        # The excluded ranks will not leave; the others may join a later world of a different size in this store.
        self.store.set("over", "")
        self.observer.close()
        self._close_groups("is no longer valid: the world was shrunk, and its ranks have new numbers")
        self.peers.close()
        place = keep.index(self.rank), len(keep)
        if peers.mine.bells:
            leave_will(peers, store, place[0])
        group = self.default_group
        bells, own_store, instrumentation = self._bells, self._own_store, self._diagnosis
        timeout_s = group.timeout_s
        world = type(self)(*place, self.backend_name, timeout_s, store, peers, bells, own_store, instrumentation)
        world.num_shrunk = self.num_shrunk + 1
        world.endings, world.last_calls = self.endings, self.last_calls
        world._shared_resources, world._deferred_cleanup = self._shared_resources, self._deferred_cleanup
        self.hook_registry.move_to(world.hook_registry)
        return world

    def _new_progress(self, bells: Doorbells) -> Progress:
        return Progress(bells, f"meshdist-progress-{self.rank}")

    def _new_backend(self, backend: str, options: BackendOptions) -> Backend:
        return make_engine(backend, options)

    def _close_groups(self, what: str) -> None:
        with self._lock:
            self._end = what
        # The end of a group may wait for ranks that wait for this one in another group.
        for group in self._groups:
            group.begin_close()
        for group in self._groups:
            group.close_as(what)
        self.progress.close()
        self._at_exit.cancel()

    def announce_departure(self, group: ProcessGroup, departure: Departure) -> None:
        """Leave a record for ranks that wait for this one in the first call of `group`."""
        # Without a backend, the store is the only connection to them.
        if not group.has_backend and group.size() > 1:
            # The first record counts. If the store has ended, no rank waits there.
            with contextlib.suppress(DistError):
                self._group_store(group.name).compare_set(withdrawn_key(group.rank()), "", departure.encode())

    def _group_store(self, name: str) -> Store:
        return PrefixStore(f"group/{name}", self.store)

    def _wait_for_leavers(self) -> None:
        # The store ends with this rank: wait a moment for the ranks that still use it, but not for ended ones.
        deadline = Deadline(_LEAVE_TIMEOUT_S)
        staying = [rank for rank in range(self.size) if rank != self.rank]
        with contextlib.suppress(KeyboardInterrupt):  # a Ctrl-C ends this, too
            while staying and not deadline.expired():
                staying = [rank for rank in staying if not self._has_left(rank)]
                with contextlib.suppress(DistStoreError):
                    self.store.wait([f"left/{rank}" for rank in staying], deadline.slice_s(0.1))

    def _has_left(self, rank: int) -> bool:
        ended = self.peers.card(rank).host == self.peers.mine.host and self.peers.ended(rank)
        return ended or self.store.check([f"left/{rank}"])

    def _close_at_exit(self, error: BaseException | None) -> None:
        self.peers.departure = Departure(PeerExit.ENDED)
        if error is not None:
            self.abort("it raised", error)
            # Leave the record at once for ranks that only poll the store: the calls in progress may take a while to
            # end.
            from meshdist.bootstrap.join import say_departure  # loaded since this rank has joined

            with contextlib.suppress(DistError):
                say_departure(self.store, self.rank, self.peers.departure)
        elif self.rank == 0 and self.size > 1 and not any(group.is_broken for group in self._groups):
            self.log.warning(
                "this process exits without a call of destroy_process_group(); call it at the end of the program:"
                " otherwise, errors of pending calls are only logged"
            )
        self.close()

    def _make_group(self, ranks: tuple[int, ...], backend: str, timeout_s: float, name: str, desc: str) -> ProcessGroup:
        if self._end is not None:
            raise ValueError(f"group {name!r} cannot be created: its world {self._end}; create groups and meshes again")
        group = ProcessGroup(self, ranks, name, desc or name, backend, timeout_s)
        self._groups.append(group)
        self.hook_registry.add_group(group)
        if self.log.isEnabledFor(logging.INFO):
            self.log.info("created group %r: %s, backend %s", group.label, ranks_text(ranks), backend)
        return group


def current_world() -> World:
    """Return the World of this rank, with its full type."""
    return cast("World", context.current_world())


def world_in(slot: WorldSlot) -> World | None:
    """Return the World in a slot, if there is one."""
    return cast("World | None", slot.world)


def resolve(group: GroupLike = None) -> ProcessGroup:
    """Return the ProcessGroup that `group` means: itself, a mesh's, or the world's if it is None."""
    return cast("ProcessGroup", context.resolve(group))
