"""Text of meshes for `print(mesh)` and error messages, and the hosts of their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshdist.errors import DistError
from meshdist.mesh.layout.layout import Layout

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup
    from meshdist.groups.world import World
    from meshdist.topology.topology import Topology


MOST_HOSTS = 4


class MeshHosts:
    """The host of each rank: from the topology given to `init_device_mesh`, else from the world."""

    def __init__(self, world: World, topology: Topology | None) -> None:
        self._world = world
        self._topology = topology
        self.rank = world.rank

    def host_names(self) -> tuple[str, ...] | None:
        """Return the host name of every rank of the world, in rank order; None if unknown."""
        return self._world.host_names() if self._topology is None else self._topology.host_names

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        """Return a key of the host of each of these global ranks."""
        if self._topology is None:
            return self._world.hosts(ranks)
        names = self._topology.host_names
        return [names[rank] for rank in ranks]

    def of_group(self, group: ProcessGroup) -> list[str]:
        """Return a key of the host of each rank of a group."""
        # A group of another world, for example one before shrinking, has other rank numbers.
        return self.hosts(group.ranks) if self._world.holds(group) else group.hosts()


def coordinate_text(layout: Layout, coordinate: Sequence[int]) -> str:
    """Return `coordinate` with axis names: `(dp=1, tp=0)`, or `(1, 0)` without names."""
    if layout.names is None:
        return f"({', '.join(map(str, coordinate))})"
    return f"({', '.join(f'{name}={index}' for name, index in zip(layout.names, coordinate, strict=True))})"


def position_text(layout: Layout, world: World, coordinate: Sequence[int] | None) -> str:
    if coordinate is None:
        return f"rank {world.rank} is outside"
    return f"rank {world.rank} at {coordinate_text(layout, coordinate)}"


def hosts_text(layout: Layout, hosts: MeshHosts) -> str | None:
    """Return the number of the mesh's ranks on each host; None if the hosts are unknown."""
    try:
        names = hosts.host_names()
    except DistError:  # after the world was destroyed: print the mesh without hosts
        return None
    if names is None:
        return None
    counts = Counter(names[rank] for rank in layout.members()).most_common()
    shown = ", ".join(f"{host} ({count})" for host, count in counts[:MOST_HOSTS])
    more = f" and {len(counts) - MOST_HOSTS} more" if len(counts) > MOST_HOSTS else ""
    return f"ranks by host: {shown}{more}"
