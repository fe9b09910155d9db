"""dry_run: simulate one rank without its peers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any

from meshdist.backends.fake import FakeBackend
from meshdist.debug.debug_level import begin_debugging
from meshdist.debug.instrumentation import WorldInstrumentation
from meshdist.groups.process_group import DESTROYED
from meshdist.groups.world import World, world_in
from meshdist.profiler.accounting import Account
from meshdist.runtime.context import WorldSlot, current_slot, use_slot
from meshdist.runtime.host_identity import Card
from meshdist.runtime.job import Job
from meshdist.runtime.peer_monitor import Peers
from meshdist.runtime.progress import JobQueue, Progress
from meshdist.runtime.waiting import Doorbells
from meshdist.store import HashStore, Store
from meshdist.store.request import use_tables
from meshdist.store.table import Table
from meshdist.system.deadline import DEFAULT_TIMEOUT_S
from meshdist.system.name_hints import explaining
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.backends.backend_options import BackendOptions
    from meshdist.backends.base import Backend
    from meshdist.topology.topology import Topology

_BACKEND = "fake"


class DryRun:
    """A dry run: the value that `dry_run` yields.

    Attributes:
        world_size: The number of ranks.
        rank: The simulated rank.
        ranks_per_host: The number of consecutive ranks on each host.
        topology: The placement of ranks on hosts, which replaces `ranks_per_host`; None if it was not given.
        account: Counts all calls, by label of the group; `account.along(mesh)` counts by axis.
    """

    def __init__(
        self, slot: WorldSlot, world_size: int, rank: int, ranks_per_host: int, topology: Topology | None = None
    ) -> None:
        self._slot = slot
        self.world_size = world_size
        self.rank = rank
        self.ranks_per_host = ranks_per_host
        self.topology = topology
        self.account = Account()
        self.tables: dict[str, Table] = {}  # the keys of the stores that the script has made, by name of the store
        self.is_joined = False  # True once the script has called init_process_group

    def __repr__(self) -> str:
        return f"<DryRun: rank {self.rank} of {self.world_size}>"

    def host_name(self, rank: int) -> str:
        """Return the name of the simulated host of a rank."""
        if self.topology is not None:
            return self.topology.host_names[rank]
        return f"node{rank // self.ranks_per_host}"

    def local_rank(self) -> int:
        """Return the simulated local rank on the host."""
        if self.topology is not None:
            return sorted(self.topology.hosts[self.host_name(self.rank)]).index(self.rank)
        return self.rank % self.ranks_per_host

    def join(self, backend: str | None, timeout_s: float, world_size: int, rank: int) -> World:
        """Return a new current world, as `init_process_group` makes it; -1 as rank or world size means not given.

        Raises:
            ValueError: `rank` or `world_size` differs from that of this run.
        """
        for name, given, own in (("rank", rank, self.rank), ("world_size", world_size, self.world_size)):
            if given not in (-1, own):
                raise ValueError(
                    f"init_process_group: this is a dry run of rank {self.rank} of {self.world_size}, got"
                    f" {name} {given}; leave {name} out, or pass it to dry_run"
                )
        self.end()
        self.is_joined = True
        return self.begin(backend or _BACKEND, timeout_s)

    def begin(self, backend: str = _BACKEND, timeout_s: float = DEFAULT_TIMEOUT_S) -> World:
        """Make a new world the current one."""
        begin_debugging()
        store = HashStore()
        peers = _DryPeers(store, range(self.world_size), self.rank, self.host_name)
        world = _DryWorld(
            self.rank, self.world_size, backend, timeout_s, store, peers, Doorbells(), None, WorldInstrumentation()
        )
        world.hook_registry.watch(self.account)
        self._slot.world = world
        return world

    def end(self, reason: str = DESTROYED) -> None:
        """Close the current world, if any; calls on its groups then raise with `reason`."""
        world, self._slot.world = world_in(self._slot), None
        if world is not None:
            world.close(reason)


@explaining
@contextmanager
def dry_run(
    world_size: int, rank: int = 0, *, ranks_per_host: int | None = None, topology: Any = None
) -> Iterator[DryRun]:
    """Run the block as one rank of a world of `world_size`, without the others.

    Scripts run unchanged, with any number of ranks: the world exists without environment, launcher or peers, and
    `init_process_group` and `destroy_process_group` begin and end it like a real one. Meshes, groups, messages,
    objects, collectives and async calls check their arguments as in a real run, for any backend, installed or not.
    No call waits, and no thread, socket, shared memory or file is made. `DryRun.account` counts the calls.

    Results have the shapes and dtypes of a real run, and the values of a world in which every rank passes the same
    input as this one: the sum of `x` is `world_size * x`, an all_gather yields copies, a broadcast leaves the array
    unchanged. Data that only another rank has is zero, and None as an object: the result of `recv`, and the block that
    a scatter returns on a rank other than the source.

    The run belongs to the context of the block, so dry runs can follow each other, be nested, run inside a real world,
    and run in several threads at once. A thread that the script starts joins the run if it begins in a copy of the
    context: `Thread(target=contextvars.copy_context().run, args=(main,))`. A TCPStore or FileStore of the script is a
    table in this process; waiting in it for a key of another rank raises at once.

    Args:
        world_size: The number of ranks.
        rank: The rank to simulate.
        ranks_per_host: Number of consecutive ranks on each simulated host; all on one if None.
        topology: The placement of ranks on hosts, instead of `ranks_per_host`: a `Topology` of `world_size` ranks, the
            path of a TOML file, or a networkx graph. `Topology.find()` returns it in the run.

    Yields:
        The DryRun.

    Raises:
        TypeError: A number is not an integer.
        ValueError: `world_size` or `ranks_per_host` is below 1, `rank` is not in the world, the topology has a
            different number of ranks, or both `topology` and `ranks_per_host` are given.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     mesh = dist.init_device_mesh("cpu", (512, 128), mesh_dim_names=("dp", "tp"))
        ...     return mesh.get_coordinate(), mesh["tp"].all_reduce(np.ones(2)).tolist()
        >>> with dist.dry_run(world_size=65536, rank=1000) as dry:
        ...     main()
        ((7, 104), [128.0, 128.0])
        >>> dry.account.total().calls
        1
    """
    size, place = _number("world_size", world_size), _number("rank", rank)
    if size < 1:
        raise ValueError(f"dry_run: world_size must be at least 1, got {size}")
    if not 0 <= place < size:
        allowed = f"rank must be 0 to {size - 1}, got" if size > 1 else "there is only rank 0; got"
        raise ValueError(f"dry_run: {allowed} {place}")
    per_host = size if ranks_per_host is None else _number("ranks_per_host", ranks_per_host)
    if per_host < 1:
        raise ValueError(f"dry_run: ranks_per_host must be at least 1, got {per_host}")
    outer, slot = current_slot(), WorldSlot()
    machine = None if topology is None else _topology(topology, size, ranks_per_host)
    dry = slot.dry = DryRun(slot, size, place, per_host, machine)
    use_slot(slot)
    outer_tables = use_tables(dry.tables)
    try:
        dry.begin()
        yield dry
    finally:
        dry.end("is no longer valid: the dry run has ended")
        use_slot(outer)
        use_tables(outer_tables)


def _number(name: str, value: int) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"dry_run: {name} must be an integer, got {value!r}") from None


def _topology(given: Any, world_size: int, ranks_per_host: int | None) -> Topology:
    from meshdist.topology.topology import Topology  # most dry runs need none

    if ranks_per_host is not None:
        raise ValueError("dry_run: got both ranks_per_host and topology; pass one of them")
    topology = Topology.of(given)
    if topology.num_ranks != world_size:
        raise ValueError(
            f"dry_run: the topology has {counted(topology.num_ranks, 'rank')}, but world_size is {world_size};"
            " describe all ranks"
        )
    return topology


class _DryWorld(World):
    """A world of one rank that completes every call at once."""

    def _new_progress(self, bells: Doorbells) -> Progress:
        return _AtOnce(bells, "")

    def _new_backend(self, backend: str, options: BackendOptions) -> Backend:
        return FakeBackend(options)


class _AtOnce(Progress):
    """Runs async calls in the caller's thread, when they are made."""

    def submit(self, queue: JobQueue, job: Job) -> None:
        if job.advance(check=True):
            job.work.complete(job.error)
        else:  # a message of this rank to itself, which it has not sent yet
            super().submit(queue, job)


class _DryPeers(Peers):
    """Makes the cards of the ranks on demand, one for each host: there may be very many ranks."""

    def __init__(self, store: Store, joined_as: Sequence[int], rank: int, host_name: Callable[[int], str]) -> None:
        self._rank = rank
        self._host_name = host_name
        self._by_host: dict[str, Card] = {}
        self._joined_as = joined_as
        super().__init__(store, self.card(rank), len(joined_as))
        self._joined_as = joined_as

    def renumbered(self, ranks: Sequence[int], store: Store) -> _DryPeers:
        joined_as = [self.joined_as(rank) for rank in ranks]
        return _DryPeers(store, joined_as, list(ranks).index(self._rank), self._host_name)

    def card(self, rank: int) -> Card:
        name = self._host_name(self._joined_as[rank])
        card = self._by_host.get(name)
        if card is None:
            card = self._by_host[name] = Card(name, name, os.getpid(), 0, "")
        return card

    def cards(self, ranks: Sequence[int]) -> list[Card]:
        return [self.card(rank) for rank in ranks]

    def ended(self, rank: int) -> bool:
        return False
