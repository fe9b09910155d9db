"""Meshes in words, for `print(mesh)` and for error messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshdist.errors import DistError
from meshdist.mesh.layout import Layout

if TYPE_CHECKING:
    from meshdist.mesh.mesh_hosts import MeshHosts
    from meshdist.world import World

MOST_HOSTS = 4
MOST_RANKS = 8


def coordinate_text(layout: Layout, coordinate: Sequence[int]) -> str:
    """Return `coordinate` with its axes' names: `(dp=1, tp=0)`, or `(1, 0)` without names."""
    if layout.names is None:
        return f"({', '.join(map(str, coordinate))})"
    return f"({', '.join(f'{name}={index}' for name, index in zip(layout.names, coordinate, strict=True))})"


def ranks_text(layout: Layout) -> str:
    """Return the mesh's ranks in its order, shortened: `ranks 0, 1, 2, ... 63`."""
    ranks = layout.ranks.reshape(-1)
    if ranks.size <= MOST_RANKS:
        return f"ranks {', '.join(map(str, ranks.tolist()))}"
    return f"ranks {', '.join(map(str, ranks[:3].tolist()))}, ... {ranks[-1]}"


def position_text(layout: Layout, world: World, coordinate: Sequence[int] | None) -> str:
    """Return where the calling rank sits."""
    if coordinate is None:
        return f"rank {world.rank} is outside"
    return f"rank {world.rank} at {coordinate_text(layout, coordinate)}"


def hosts_text(layout: Layout, hosts: MeshHosts) -> str | None:
    """Return how many of the mesh's ranks each host has, None where they are not known."""
    try:
        names = hosts.host_names()
    except DistError:  # asked after the end of the world: the mesh can still be printed, without its hosts
        return None
    if names is None:
        return None
    counts = Counter(names[rank] for rank in layout.members()).most_common()
    shown = ", ".join(f"{host} ({count})" for host, count in counts[:MOST_HOSTS])
    more = f" and {len(counts) - MOST_HOSTS} more" if len(counts) > MOST_HOSTS else ""
    return f"ranks by host: {shown}{more}"
