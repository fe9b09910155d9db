"""Placing meshes: which rank goes where, so that the axes that talk most stay inside hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.mesh.axis_names import UnknownAxisError, checked_names

if TYPE_CHECKING:
    from meshdist.mesh.rank_list import Ranks
    from meshdist.topology.topology import Topology


class Placement:
    """Keep a topology and the axes that must stay inside its hosts: what `init_device_mesh` takes as `topology`.

    `Topology.inside` makes one.

    Args:
        topology: The machine.
        axes: Names of axes of the mesh to come; none: as many of the last axes as fit.

    Example:
        >>> from meshdist.topology import Topology
        >>> Topology.uniform(2, 2).inside("tp")
        Placement(<Topology: 4 ranks on 2 hosts: host0 (2), host1 (2)>, inside=('tp',))
    """

    def __init__(self, topology: Topology, axes: Sequence[str] = ()) -> None:
        self.topology = topology
        self.axes = tuple(axes)

    def place(self, shape: Sequence[int], names: Sequence[str] | None, among: Sequence[int] | None = None) -> Ranks:
        """Return the ranks of a mesh of this shape; see `Topology.place`."""
        return self.topology.place(shape, names, self.axes or None, among)

    def __repr__(self) -> str:
        return f"Placement({self.topology!r}, inside={self.axes})"


def placed_ranks(
    topology: Any, shape: Sequence[int], names: Sequence[str] | None, world_size: int, among: Sequence[int] | None
) -> Ranks:
    """Return the ranks of a mesh with this `topology=`, a Placement or anything that `Topology.of` takes.

    Raises:
        ValueError: The topology is of another number of ranks than the world, or the axes do not fit into its hosts.
        TypeError: It is no topology.
    """
    from meshdist.topology.topology import Topology

    placement = topology if isinstance(topology, Placement) else Placement(Topology.of(topology))
    if placement.topology.num_ranks != world_size:
        raise ValueError(
            f"topology: it has {placement.topology.num_ranks} ranks, but the world has {world_size};"
            " describe where all ranks of the world run"
        )
    return placement.place(shape, names, among)


def place_ranks(
    hosts: Mapping[str, Sequence[int]],
    shape: Sequence[int],
    names: Sequence[str] | None,
    inside: str | Sequence[str] | None,
) -> Ranks:
    """Return the ranks of a mesh of `shape`; see `Topology.place`.

    A mesh is filled block by block: a block is what the inner axes span, and whole blocks are cut from the ranks of
    each host, host after host. What is left of the hosts makes up the last blocks, if they are needed and may be mixed.
    """
    extents = tuple(int(extent) for extent in shape)
    if not extents or min(extents) < 1:
        raise ValueError(f"place: a shape has at least one axis, of at least 1 rank each, got {extents}")
    num_ranks = sum(map(len, hosts.values()))
    if math.prod(extents) > num_ranks:
        raise ValueError(
            f"place: a mesh of shape {extents} needs {math.prod(extents)} ranks, but the topology has {num_ranks}"
        )
    axis_names = None if names is None else checked_names(names, extents)
    inner = _inner_axes(axis_names, inside)
    order = [axis for axis in range(len(extents)) if axis not in inner] + inner
    ordered = tuple(extents[axis] for axis in order)
    counts = [len(ranks) for ranks in hosts.values()]
    if inner:
        block = math.prod(extents[axis] for axis in inner)
        _check_fits(hosts, block, math.prod(extents) // block, [(axis_names or ())[axis] for axis in inner])
        # Beyond what was asked: of the outer axes, too, as much as fits.
        larger = [size for size in _block_sizes(ordered, counts) if size >= block and size % block == 0]
    else:
        larger = _block_sizes(ordered, counts)
    placed = _cut(list(hosts.values()), larger[0])[: math.prod(extents)].reshape(ordered)
    return np.ascontiguousarray(placed.transpose(np.argsort(order)))


def _inner_axes(names: tuple[str, ...] | None, inside: str | Sequence[str] | None) -> list[int]:
    """Return the axes that must stay inside, in the order of the mesh."""
    wanted = () if inside is None else (inside,) if isinstance(inside, str) else tuple(inside)
    if wanted and names is None:
        raise ValueError(f"place: axes {list(wanted)} are to stay inside hosts, but the mesh has no names; give names")
    for name in wanted:
        if name not in (names or ()):
            raise UnknownAxisError(
                f"place: there is no axis {name!r} to keep inside hosts; the axes are"
                f" {', '.join(map(repr, names or ()))}"
            )
    return [axis for axis, name in enumerate(names or ()) if name in wanted]


def _check_fits(hosts: Mapping[str, Sequence[int]], block: int, needed: int, names: Sequence[str]) -> None:
    found = sum(len(ranks) // block for ranks in hosts.values())
    if found < needed:
        counts = sorted({len(ranks) for ranks in hosts.values()})
        have = f"{counts[0]} ranks each" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} ranks"
        raise ValueError(
            f"place: {', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'} to stay inside hosts,"
            f" which takes {needed} blocks of {block} ranks, but the {len(hosts)} hosts have {have} and hold {found};"
            " make these axes smaller, name fewer, or leave the choice to the topology with inside=None"
        )


def _block_sizes(extents: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the sizes of blocks that all fit into hosts, the largest first, and where none does, one that mostly does.

    A block spans some last axes, and an even part of the one before them.
    """
    total = math.prod(extents)
    sizes = {1}
    for axis in reversed(range(len(extents))):
        last = math.prod(extents[axis + 1 :])
        sizes.update(last * part for part in range(1, extents[axis] + 1) if extents[axis] % part == 0)
    fitting = [size for size in sizes if sum(count // size for count in counts) * size >= total]
    if max(fitting) > 1:
        return sorted(fitting, reverse=True)
    # Then the rows of the last axis that is not trivial, or even parts of them, and some of them will be mixed.
    row = next((extent for extent in reversed(extents) if extent > 1), 1)
    return [max(part for part in range(1, row + 1) if row % part == 0 and part <= max(counts))]


def _cut(hosts: Sequence[Sequence[int]], block: int) -> Ranks:
    """Return all ranks, first the whole blocks of each host, then what is left over."""
    whole = [rank for ranks in hosts for rank in ranks[: len(ranks) // block * block]]
    rest = [rank for ranks in hosts for rank in ranks[len(ranks) // block * block :]]
    return np.array(whole + rest, dtype=np.int64)
