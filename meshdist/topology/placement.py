"""Place the ranks of a mesh so that its inner axes stay inside hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshdist.errors import UnknownAxisError
from meshdist.mesh.layout.axes_and_chunks import checked_names
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.mesh.layout.rank_list import Ranks


def place_ranks(
    hosts: Mapping[str, Sequence[int]],
    shape: Sequence[int],
    names: Sequence[str] | None,
    inside: str | int | Sequence[str | int] | None,
) -> Ranks:
    """Return the ranks of a mesh of `shape`; see `Topology.place`.

    A mesh is filled block by block: a block spans the inner axes, and whole blocks are cut from the ranks of each host,
        host after host. The remaining ranks form the last blocks, if they are needed and may span hosts.
    """
    extents = tuple(int(extent) for extent in shape)
    if not extents or min(extents) < 1:
        raise ValueError(f"place: a shape has at least one axis, of at least 1 rank each, got {extents}")
    num_ranks = sum(map(len, hosts.values()))
    if math.prod(extents) > num_ranks:
        raise ValueError(
            f"place: a mesh of shape {extents} needs {counted(math.prod(extents), 'rank')}, but the"
            f" topology has {num_ranks}"
        )
    axis_names = None if names is None else checked_names(names, extents)
    inner = _inner_axes(len(extents), axis_names, inside)
    order = [axis for axis in range(len(extents)) if axis not in inner] + inner
    ordered = tuple(extents[axis] for axis in order)
    counts = [len(ranks) for ranks in hosts.values()]
    if inner:
        block = math.prod(extents[axis] for axis in inner)
        _check_fits(
            hosts, block, math.prod(extents) // block, [axis_names[axis] if axis_names else axis for axis in inner]
        )
        # Also keep as much of the outer axes inside hosts as fits.
        larger = [size for size in _block_sizes(ordered, counts) if size >= block and size % block == 0]
    else:
        larger = _block_sizes(ordered, counts)
    placed = _cut(list(hosts.values()), larger[0])[: math.prod(extents)].reshape(ordered)
    return np.ascontiguousarray(placed.transpose(np.argsort(order)))


def _inner_axes(ndim: int, names: tuple[str, ...] | None, inside: str | int | Sequence[str | int] | None) -> list[int]:
    wanted = () if inside is None else (inside,) if isinstance(inside, (str, int)) else tuple(inside)
    found = set()
    for axis in wanted:
        if isinstance(axis, int) and not isinstance(axis, bool) and -ndim <= axis < ndim:
            found.add(axis % ndim)
        elif isinstance(axis, str) and names is None:
            raise ValueError(
                f"place: axis {axis!r} is to stay inside hosts, but the mesh has no names; pass names, or its index"
            )
        elif isinstance(axis, str) and names is not None and axis in names:
            found.add(names.index(axis))
        else:
            axes: Sequence[str | int] = range(ndim) if names is None else names
            raise UnknownAxisError(
                f"place: there is no axis {axis!r} to keep inside hosts; the axes are {', '.join(map(repr, axes))}"
            )
    return sorted(found)


def _check_fits(hosts: Mapping[str, Sequence[int]], block: int, needed: int, names: Sequence[str | int]) -> None:
    found = sum(len(ranks) // block for ranks in hosts.values())
    if found < needed:
        counts = sorted({len(ranks) for ranks in hosts.values()})
        have = f"{counted(counts[0], 'rank')} each" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} ranks"
        raise ValueError(
            f"place: {', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'} to stay inside hosts,"
            f" which takes {counted(needed, 'block')} of {counted(block, 'rank')}, but the"
            f" {'host has' if len(hosts) == 1 else f'{len(hosts)} hosts have'} {have}, room for {found}; make"
            " these axes smaller, name fewer, or leave the choice to the topology with inside=None"
        )


def _block_sizes(extents: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the block sizes that all fit into hosts, the largest first; if none fits, one that mostly does.

    A block spans some last axes, and an even part of the axis before them.
    """
    total = math.prod(extents)
    sizes = {1}
    for axis in reversed(range(len(extents))):
        last = math.prod(extents[axis + 1 :])
        sizes.update(last * part for part in range(1, extents[axis] + 1) if extents[axis] % part == 0)
    fitting = [size for size in sizes if sum(count // size for count in counts) * size >= total]
    if max(fitting) > 1:
        return sorted(fitting, reverse=True)
    # Fall back to rows of the last nontrivial axis, or even parts of them; some will span hosts.
    row = next((extent for extent in reversed(extents) if extent > 1), 1)
    return [max(part for part in range(1, row + 1) if row % part == 0 and part <= max(counts))]


def _cut(hosts: Sequence[Sequence[int]], block: int) -> Ranks:
    """Return all ranks: first the whole blocks of each host, then the remaining ranks."""
    whole = [rank for ranks in hosts for rank in ranks[: len(ranks) // block * block]]
    rest = [rank for ranks in hosts for rank in ranks[len(ranks) // block * block :]]
    return np.array(whole + rest, dtype=np.int64)
