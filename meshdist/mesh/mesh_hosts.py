"""MeshHosts: which host each rank is on, as a mesh knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdist.process_group import ProcessGroup
    from meshdist.topology.topology import Topology
    from meshdist.world import World


class MeshHosts:
    """Say which host each rank is on: as the topology has it that the mesh was placed on, else as the world has it.

    Args:
        world: The world that the mesh stands in.
        topology: What was given to `init_device_mesh`, of all ranks of that world; None where nothing was.

    Example:
        >>> import meshdist
        >>> with meshdist.dry_run(4):
        ...     world = meshdist.current.current_world()
        ...     MeshHosts(world, meshdist.Topology.uniform(2, 2)).hosts([0, 3]), MeshHosts(world, None).hosts([0, 3])
        (['host0', 'host1'], ['dry-host-0', 'dry-host-0'])
    """

    def __init__(self, world: World, topology: Topology | None) -> None:
        self._world = world
        self._topology = topology
        self.rank = world.rank

    def host_names(self) -> tuple[str, ...] | None:
        """Return the host name of every rank of the world, in rank order; None where they are not known."""
        return self._world.host_names() if self._topology is None else self._topology.host_names

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        """Return what tells the hosts of some global ranks apart."""
        if self._topology is None:
            return self._world.hosts(ranks)
        names = self._topology.host_names
        return [names[rank] for rank in ranks]

    def of_group(self, group: ProcessGroup) -> list[str]:
        """Return what tells the hosts of a group's ranks apart, in its order."""
        # The groups of a world that this one has become, by shrinking, have other numbers.
        return self.hosts(group.ranks) if self._world.holds(group) else group.hosts()
