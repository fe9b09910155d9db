"""dry_run: one rank of a world that is not there, in which scripts run their mesh and collective calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any

from meshdist.backends.fake import FakeBackend
from meshdist.current import WorldSlot, current_slot, use_slot
from meshdist.deadline import DEFAULT_TIMEOUT_S
from meshdist.debug.levels import begin_debugging
from meshdist.peers import Card, Peers
from meshdist.process_group import DESTROYED
from meshdist.profiler.accounting import Account
from meshdist.progress import Job, JobQueue, Progress
from meshdist.store import HashStore, Store
from meshdist.store.table import Table
from meshdist.waiting import Doorbells
from meshdist.world import World

if TYPE_CHECKING:
    from meshdist.backends.base import Backend, BackendOptions
    from meshdist.topology.topology import Topology

_BACKEND = "fake"


class DryRun:
    """What `dry_run` gives.

    Attributes:
        world_size: The number of ranks.
        rank: The one that runs.
        ranks_per_host: Ranks 0 to `ranks_per_host` - 1 count as on one host, the next as many as on another.
        topology: Says the hosts instead; None where none was given.
        account: Counts all calls, from the beginning; by the label of the group, `account.along(mesh)` by axis.
        tables: The keys of the stores that the script has made, by the store's name.
        is_joined: Whether the script has called `init_process_group`.
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
        self.tables: dict[str, Table] = {}
        self.is_joined = False

    def __repr__(self) -> str:
        return f"<DryRun: rank {self.rank} of {self.world_size}>"

    def host_name(self, rank: int) -> str:
        """Return the name of the host that a rank counts as on."""
        if self.topology is not None:
            return self.topology.host_names[rank]
        return f"dry-host-{rank // self.ranks_per_host}"

    def local_rank(self) -> int:
        """Return the rank's place among those of its host."""
        if self.topology is not None:
            return sorted(self.topology.hosts[self.host_name(self.rank)]).index(self.rank)
        return self.rank % self.ranks_per_host

    def join(self, backend: str | None, timeout_s: float, world_size: int, rank: int) -> World:
        """Return the world that `init_process_group` with these arguments makes, which is in the slot.

        Raises:
            ValueError: Another rank or world size is given than this run's; -1 is none.
        """
        for what, given, own in (("rank", rank, self.rank), ("world_size", world_size, self.world_size)):
            if given not in (-1, own):
                raise ValueError(
                    f"init_process_group: this is a dry run of rank {self.rank} of {self.world_size}, got"
                    f" {what} {given}; leave {what} out, or give it to dry_run"
                )
        self.end()
        self.is_joined = True
        return self.begin(backend or _BACKEND, timeout_s)

    def begin(self, backend: str = _BACKEND, timeout_s: float = DEFAULT_TIMEOUT_S) -> World:
        """Put a new world into the slot."""
        begin_debugging()
        store = HashStore()
        peers = _DryPeers(store, range(self.world_size), self.rank, self.host_name)
        world = _DryWorld(self.rank, self.world_size, backend, timeout_s, store, peers, Doorbells())
        world.listeners.watch(self.account)
        self._slot.world = world
        return world

    def end(self, what: str = DESTROYED) -> None:
        """End the world in the slot, if there is one; `what` became of its groups."""
        world, self._slot.world = self._slot.world, None
        if world is not None:
            world.close(what)


@contextmanager
def dry_run(
    world_size: int, rank: int = 0, *, ranks_per_host: int | None = None, topology: Any = None
) -> Iterator[DryRun]:
    """Run the block as one rank of a world of `world_size`, without the others.

    Scripts run in it unchanged, on any number of ranks: the world is there, with no environment, launcher or peer, and
    `init_process_group` and `destroy_process_group` begin and end it as they do a real one. Meshes, groups, messages,
    objects, collectives and async calls check their arguments as in a real run, whatever the backend, installed or not;
    none of them waits, and no thread, socket, shared memory or file is made. Calls are counted, see `DryRun.account`.

    Results have the shapes and dtypes of a real run. Their values are those of a world in which every rank gives what
    this one gives: the sum of `x` is `world_size * x`, an all_gather yields copies, a broadcast leaves the array as it
    is. What only another rank could give is zero, and as an object None: what `recv` receives, and what a rank that is
    not the source gets from a scatter.

    The block's context is the rank, so dry runs can be made in turn, inside each other, inside a real world, and at
    once in several threads. A thread that the script starts is in the run if it begins in a copy of the context:
    `Thread(target=contextvars.copy_context().run, args=(main,))`. A TCPStore or FileStore of the script is a table in
    this process; to wait in it for a key of another rank is an error at once.

    Args:
        world_size: The number of ranks.
        rank: The one to run.
        ranks_per_host: How many consecutive ranks count as on one host; all where None.
        topology: Says which rank counts as on which host, in place of `ranks_per_host`: a `Topology` of `world_size`
            ranks, the path of a TOML file, or a networkx graph. It is also what `Topology.find()` finds in the run.

    Yields:
        The DryRun.

    Raises:
        TypeError: The numbers are no integers.
        ValueError: `world_size` or `ranks_per_host` is below 1, or `rank` not one of the ranks; a topology of another
            number of ranks, or together with `ranks_per_host`.

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
        raise ValueError(f"dry_run: rank must be 0 to {size - 1}, got {place}")
    per_host = size if ranks_per_host is None else _number("ranks_per_host", ranks_per_host)
    if per_host < 1:
        raise ValueError(f"dry_run: ranks_per_host must be at least 1, got {per_host}")
    outer, slot = current_slot(), WorldSlot()
    machine = None if topology is None else _topology(topology, size, ranks_per_host)
    dry = slot.dry = DryRun(slot, size, place, per_host, machine)
    use_slot(slot)
    try:
        dry.begin()
        yield dry
    finally:
        dry.end("is of no more use: the dry run has ended")
        use_slot(outer)


def _number(name: str, value: int) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"dry_run: {name} must be an integer, got {value!r}") from None


def _topology(given: Any, world_size: int, ranks_per_host: int | None) -> Topology:
    from meshdist.topology.topology import Topology  # most dry runs need none

    if ranks_per_host is not None:
        raise ValueError("dry_run: got ranks_per_host and topology, which both say the hosts; give one of them")
    topology = Topology.of(given)
    if topology.num_ranks != world_size:
        raise ValueError(
            f"dry_run: the topology has {topology.num_ranks} ranks, but world_size is {world_size}; describe where all"
            " ranks run"
        )
    return topology


class _DryWorld(World):
    """A world of one rank that carries out every call by itself, at once."""

    def _new_progress(self, bells: Doorbells) -> Progress:
        return _AtOnce(bells, "")

    def _new_engine(self, backend: str, options: BackendOptions) -> Backend:
        return FakeBackend(options)


class _AtOnce(Progress):
    """Carries out async calls when they are made, in the caller's thread."""

    def submit(self, queue: JobQueue, job: Job) -> None:
        done = job.advance(check=True)
        assert done, "a fake backend waits for nothing"
        job.work.settle(job.error)


class _DryPeers(Peers):
    """Makes up the cards of the ranks, of which there may be very many: one for each host."""

    def __init__(self, store: Store, joined_as: Sequence[int], rank: int, host_name: Callable[[int], str]) -> None:
        self._rank = rank
        self._host_name = host_name
        self._by_host: dict[str, Card] = {}
        self._joined_as = joined_as
        super().__init__(store, self.card(rank), len(joined_as))
        self._joined_as = joined_as

    def renumbered(self, ranks: Sequence[int], store: Store) -> _DryPeers:
        """Return what is known of some of the ranks, as the peers of a world of their own."""
        joined_as = [self.joined_as(rank) for rank in ranks]
        return _DryPeers(store, joined_as, list(ranks).index(self._rank), self._host_name)

    def card(self, rank: int) -> Card:
        """Return the card of a global rank."""
        name = self._host_name(self._joined_as[rank])
        card = self._by_host.get(name)
        if card is None:
            card = self._by_host[name] = Card(name, name, os.getpid(), 0, "")
        return card

    def cards(self, ranks: Sequence[int]) -> list[Card]:
        """Return the cards of several global ranks."""
        return [self.card(rank) for rank in ranks]

    def ended(self, rank: int) -> bool:
        """Return False: a rank that is not there does not end."""
        return False
