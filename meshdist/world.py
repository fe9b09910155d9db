"""World: everything a rank has between init_process_group and destroy_process_group."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from meshdist.backends.base import Backend, BackendOptions
from meshdist.backends.registry import backend_name, make_backend
from meshdist.collectives.methods import CollectiveMethods
from meshdist.current import WorldSlot, current_slot, current_world, resolve
from meshdist.deadline import Deadline, Timeout
from meshdist.doorbells import SocketDoorbells
from meshdist.errors import DistError, DistNetworkError, DistStoreError, DistTimeoutError
from meshdist.init_urls import whole_number
from meshdist.joining import join, leave
from meshdist.peers import Peers, my_card
from meshdist.process_group import ProcessGroup
from meshdist.progress import Progress
from meshdist.store import PrefixStore, Store, TCPStore
from meshdist.waiting import Doorbells

_log = logging.getLogger("meshdist")
_LAST_GOODBYE_S = 5.0
_LAST_WORDS_S = 0.5
_NAMED_MEMBERS = 8


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
    """

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
        self.progress = Progress(bells, f"meshdist-progress-{rank}")
        self._groups: list[ProcessGroup] = []
        self._shared: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}
        self._made: Counter[str] = Counter()
        self._leftovers: list[Callable[[], bool]] = []
        everyone = tuple(range(size))
        self.default_group = self._make_group(everyone, backend, timeout_s, "world", "world")
        self._shared[everyone, backend] = self.default_group
        atexit.register(self._close_at_exit)

    def new_group(self, ranks: tuple[int, ...], backend: str, timeout_s: float, desc: str = "") -> ProcessGroup:
        """Return a new group of these global ranks, in this order."""
        # Named by the members and how many groups they have had, so that they agree on it without a word.
        name = _member_name(ranks)
        self._made[name] += 1
        return self._make_group(ranks, backend, timeout_s, f"{name}#{self._made[name]}", desc)

    def shared_group(self, ranks: tuple[int, ...], backend: str | None = None, desc: str = "") -> ProcessGroup:
        """Return the group of exactly these global ranks in this order; made once for each list and backend."""
        key = ranks, backend_name(backend) if backend is not None else self.backend_name
        group = self._shared.get(key)
        if group is None:
            # Members may ask for their shared groups in any order, and call them what they like.
            group = self._shared[key] = self._make_group(*key, self.timeout_s, f"{_member_name(ranks)}@{key[1]}", desc)
        return group

    def host_names(self) -> tuple[str, ...] | None:
        """Return the host name of every rank, in rank order."""
        return tuple(card.host_name for card in self._peers.cards(range(self.size)))

    def make_backend(self, group: ProcessGroup) -> Backend:
        """Return a new backend for `group`."""
        options = BackendOptions(
            name=group.name,
            label=group.label,
            store=PrefixStore(f"group/{group.name}", self.store),
            rank=group.rank(),
            ranks=group.ranks,
            timeout_s=group.timeout_s,
            bells=self._bells,
            peers=self._peers,
            leftovers=self._leftovers,
        )
        return make_backend(group.backend_name, options)

    def drop(self, group: ProcessGroup) -> None:
        """Close one group."""
        if group not in self._groups:
            raise ValueError(f"{group!r} is not a group of this world, or was destroyed already")
        group.close()
        self._groups.remove(group)
        self._shared = {key: other for key, other in self._shared.items() if other is not group}

    def close(self) -> None:
        """Close all groups and leave the store."""
        for group in self._groups:
            group.close()
        self.progress.close()
        try:
            leave(self.store, self.rank, self.size)
        except DistError as error:
            # The store may have gone with the rank or the launcher that held it; then nobody joins there again.
            _log.debug("rank %d left without telling the store: %s", self.rank, error)
        if self._own_store is not None:
            if isinstance(self._own_store, TCPStore) and self._own_store.is_master:
                self._wait_for_leavers()
            self._own_store.close()
        self._peers.close()
        self._bells.close()
        atexit.unregister(self._close_at_exit)

    def abort(self, reason: str) -> None:
        """Tell the ranks of all groups that this one gives up."""
        for group in self._groups:
            group.abort(reason)

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

    def _close_at_exit(self) -> None:
        # Set by the interpreter, and by the launchers, where the process ends with an uncaught exception.
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.abort(f"it raised {type(error).__name__}: {error}")
        elif self.rank == 0 and not any(group.is_broken for group in self._groups):
            _log.warning("meshdist: the process ends without destroy_process_group(); call it when the ranks are done")
        self.close()

    def _make_group(self, ranks: tuple[int, ...], backend: str, timeout_s: float, name: str, desc: str) -> ProcessGroup:
        group = ProcessGroup(self, ranks, name, desc or name, backend, timeout_s)
        self._groups.append(group)
        return group


def _member_name(ranks: tuple[int, ...]) -> str:
    members = ",".join(map(str, ranks))
    if len(ranks) <= _NAMED_MEMBERS:
        return f"ranks {members}"
    return f"{len(ranks)} ranks {hashlib.sha256(members.encode()).hexdigest()[:16]}"


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Join the world: meet all other ranks, and make the default group.

    Args:
        backend: "gloo" (shared memory) or another registered name, in any case. None means "gloo".
        init_method: Where the ranks meet: "env://" (the default: MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE from the
            environment, as `meshrun` sets them), "tcp://host:port" or "file:///path". With a file, or where the host is
            a multicast address, the ranks find and number themselves if they give none.
        timeout: How long to wait for the others, and how long any call of this world may wait: seconds or a timedelta.
            30 minutes where None.
        world_size: Number of ranks, where the environment or the URL does not say it.
        rank: This rank, likewise.
        store: A store that all ranks reach, instead of `init_method`; then rank and world_size are needed.
        group_name: Tells jobs apart that use the same file or multicast address; of no meaning elsewhere.
        pg_options: Options of the backend; none of those here has any.
        device_id: Of no meaning for CPU backends.

    Raises:
        ValueError: Called twice, an unknown backend, a missing or impossible rank or world size, a rank that is taken.
        DistNetworkError: The store cannot be reached.
        DistTimeoutError: Some ranks did not come; says which.
    """
    slot = current_slot()
    if slot.world is not None:
        raise ValueError("init_process_group was called already; destroy_process_group() comes before the next")
    if store is not None and init_method is not None:
        raise ValueError("give init_method or store, and only one of them")
    from meshdist.rendezvous import rendezvous

    name, deadline = backend_name(backend), Deadline(timeout)
    if store is not None:
        rank, world_size = whole_number(rank, "rank"), whole_number(world_size, "world_size")
        _check_place(rank, world_size)
        enter_world(slot, store, rank, world_size, name, SocketDoorbells(), deadline)
        return
    while True:
        url = init_method if init_method is not None else "env://"
        own, my_rank, size = rendezvous(url, rank, world_size, deadline.remaining_s(), group_name=group_name)
        try:
            enter_world(slot, own, my_rank, size, name, SocketDoorbells(), deadline, own_store=True)
            return
        except DistNetworkError:
            # The store went away: it was that of the world before, whose last rank was just leaving. Meet again.
            own.close()
            if deadline.expired():
                raise
        except DistTimeoutError:
            if isinstance(own, TCPStore) and own.is_master:
                # The others' time ends about now; without the store they could not say who is missing.
                threading.Event().wait(_LAST_WORDS_S)
            own.withdraw()
            raise
        except BaseException:
            own.withdraw()
            raise


def enter_world(
    slot: WorldSlot,
    store: Store,
    rank: int,
    world_size: int,
    backend: str,
    bells: Doorbells,
    deadline: Deadline,
    *,
    own_store: bool = False,
) -> World:
    """Meet the other ranks in `store` and put the World into `slot`."""
    card = my_card(bells.base)
    try:
        joined = join(store, rank, world_size, card, deadline)
    except BaseException:
        bells.close()
        raise
    peers = Peers(joined, card, world_size)
    world = World(rank, world_size, backend, deadline.timeout_s, joined, peers, bells, store if own_store else None)
    slot.world = world
    return world


def destroy_process_group(group: CollectiveMethods | None = None) -> None:
    """Leave the world, or give up one group.

    Args:
        group: The group to close; None or the world's group closes all and ends the world. `init_process_group` may
            be called again then.

    Raises:
        ValueError: There is no world, or the group is closed already.
    """
    world = current_world()
    members = resolve(group)
    if members.rank() < 0:
        return  # of a group that it is not in, this rank holds nothing
    if members is not world.default_group:
        world.drop(members)
        return
    current_slot().world = None
    world.close()


def abort_process_group(group: CollectiveMethods | None = None) -> None:
    """Give up at once: the calls of the other ranks that wait for this one raise.

    Args:
        group: The group; None or the world's group aborts all groups and ends the world.

    Raises:
        ValueError: There is no world.
    """
    world = current_world()
    members = resolve(group)
    reason = f"rank {world.rank} called abort_process_group"
    if members is not world.default_group:
        members.abort(reason)
        return
    current_slot().world = None
    world.abort(reason)
    world.close()


def _check_place(rank: int, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"with store=, world_size must be given, at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"with store=, rank must be given, 0 to {world_size - 1}, got {rank}")
