"""Contention: the cost of a round of simultaneous messages, which share links; the routes between ranks as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshdist.mesh.layout.rank_list import Ranks
    from meshdist.topology.part import Part

    Floats = NDArray[np.float64]


class Cost(NamedTuple):
    """The cost of a round or an algorithm: `latency_s + nbytes * s_per_byte` seconds."""

    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes * self.s_per_byte

    def times(self, rounds: float, share: float) -> Cost:
        return Cost(self.latency_s * rounds, self.s_per_byte * rounds * share)

    def then(self, other: Cost) -> Cost:
        return Cost(self.latency_s + other.latency_s, self.s_per_byte + other.s_per_byte)


NOTHING = Cost(0.0, 0.0)


class Routes:
    """The route of every rank up the tree of `parts`, which are sorted parents first.

    A message goes up from its sender's part to the first common ancestor, and down from there. It crosses the link of
    each part on its route; between two ranks of one part it crosses that part's memory. Messages of a round share the
    links, in each direction separately.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        index = {part.name: number for number, part in enumerate(parts)}
        ways: list[list[int]] = []
        hosts: list[int] = []
        for number, part in enumerate(parts):
            above = -1 if part.parent is None else index[part.parent]
            ways.append([*ways[above], number] if above >= 0 else [number])
            hosts.append(number if part.kind == "host" else hosts[above] if above >= 0 else -1)
        self._num_parts = len(parts)
        leaf = np.empty(sum(len(part.ranks) for part in parts), dtype=np.int64)
        for number, part in enumerate(parts):
            leaf[list(part.ranks)] = number
        self._leaf = leaf
        self.host = np.array(hosts)[leaf]
        self._way = _padded(ways)[:, leaf]
        links = [part.link for part in parts]
        self._latency = np.array([link.latency_s if link else 0.0 for link in links])
        self._s_per_byte = np.array([1 / link.bandwidth if link else 0.0 for link in links])
        self._memory_latency = np.array([part.memory.latency_s for part in parts])
        self._memory_s_per_byte = np.array([1 / part.memory.bandwidth for part in parts])

    def round(self, src: Ranks, dst: Ranks, weights: Floats | None = None) -> Cost:
        """Return the cost of simultaneous messages from each of `src` to the rank at the same place of `dst`.

        A rank sends nothing to itself. `weights` multiplies the bytes of each message; None: 1.
        """
        src, dst = src.reshape(-1), dst.reshape(-1)
        sent = src != dst
        if not sent.all():
            src, dst = src[sent], dst[sent]
            weights = None if weights is None else weights.reshape(-1)[sent]
        elif weights is not None:
            weights = weights.reshape(-1)
        if not src.size:
            return NOTHING
        from_leaf, to_leaf = self._leaf[src], self._leaf[dst]
        inside = from_leaf == to_leaf
        latency = np.where(inside, self._memory_latency[from_leaf], 0.0)
        load = self._loads(from_leaf, inside, weights) * self._memory_s_per_byte
        slowest = float(load.max())
        for level in self._way[1:]:  # the root has no link
            up, down = level[src], level[dst]
            # A route that ended further up is padded with numbers that are no part.
            apart = up != down
            for ends in (up, down):
                crossed = apart & (ends < self._num_parts)
                ends = np.where(crossed, ends, 0)
                latency += np.where(crossed, self._latency[ends], 0.0)
                slowest = max(slowest, float((self._loads(ends, crossed, weights) * self._s_per_byte).max()))
        return Cost(float(latency.max()), slowest)

    def _loads(self, ends: Ranks, crossed: NDArray[np.bool_], weights: Floats | None) -> Floats:
        shares = crossed.astype(np.float64) if weights is None else crossed * weights
        loads: Floats = np.bincount(ends, weights=shares, minlength=self._num_parts).astype(np.float64)
        return loads

    def everyone_to_everyone(self, groups: Ranks) -> Cost:
        """Return the cost if every rank sends to every other rank of its group, in any order.

        `groups` has one group per row. The cost has the latency of one message, and the seconds per byte that each rank
        sends to each other rank.
        """
        num_groups, size = groups.shape
        row = np.repeat(np.arange(num_groups), size)
        slowest, latency = 0.0, 0.0
        leaves = self._leaf[groups].reshape(-1)
        # Members on one part send to each other through its memory, and to all other members over its link.
        pairs, counts = _counted(row, leaves, self._num_parts)
        load = np.bincount(pairs, weights=counts * (counts - 1.0), minlength=self._num_parts)
        slowest = float((load * self._memory_s_per_byte).max())
        if (counts > 1).any():
            latency = float(self._memory_latency[pairs[counts > 1]].max())
        span = np.zeros(num_groups * size)
        for level in self._way[1:]:
            ends = level[groups].reshape(-1)
            real = ends < self._num_parts
            pairs, counts = _counted(row[real], ends[real], self._num_parts)
            load = np.bincount(pairs, weights=counts * (size - counts * 1.0), minlength=self._num_parts)
            slowest = max(slowest, float((load * self._s_per_byte).max()))
            shared = (ends.reshape(num_groups, size) == ends.reshape(num_groups, size)[:, :1]).all(axis=1)
            crossed = real & ~np.repeat(shared, size)
            span += np.where(crossed, self._latency[np.where(real, ends, 0)], 0.0)
        # The farthest pair: up from the one, down to the other.
        return Cost(max(latency, 2 * float(span.max())), slowest)


def _padded(ways: Sequence[Sequence[int]]) -> Ranks:
    """Return the routes as columns of an array; short ones are padded with a unique number that is no part."""
    depth = max(map(len, ways))
    padded = np.empty((depth, len(ways)), dtype=np.int64)
    for number, way in enumerate(ways):
        padded[: len(way), number] = way
        padded[len(way) :, number] = len(ways) + number
    return padded


def _counted(row: Ranks, part: Ranks, num_parts: int) -> tuple[Ranks, Ranks]:
    """Return the part, and the number of members on it, for each group and part with members."""
    keys, counts = np.unique(row * num_parts + part, return_counts=True)
    return keys % num_parts, counts
