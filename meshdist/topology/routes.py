"""The ways between ranks, as arrays: what a round of messages takes that are all under way at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshdist.mesh.rank_list import Ranks
    from meshdist.topology.part import Part

    Floats = NDArray[np.float64]


class Cost(NamedTuple):
    """What a round, or a whole algorithm, takes: `latency_s + nbytes * s_per_byte` seconds."""

    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return the time for `nbytes` bytes."""
        return self.latency_s + nbytes * self.s_per_byte

    def times(self, rounds: float, share: float) -> Cost:
        """Return the cost of `rounds` rounds that move `share` of the bytes each."""
        return Cost(self.latency_s * rounds, self.s_per_byte * rounds * share)

    def then(self, other: Cost) -> Cost:
        """Return the cost of this and, after it, `other`."""
        return Cost(self.latency_s + other.latency_s, self.s_per_byte + other.s_per_byte)


NOTHING = Cost(0.0, 0.0)


class Routes:
    """Know the way of every rank up the tree of parts.

    A message goes up from its sender's part to the first part above both, and down from there. It crosses the links of
    the parts on its way, each with the latency and the bandwidth of its link; between two ranks of one part it crosses
    that part's memory. All messages of a round share what they cross, up and down apart from each other.

    Args:
        parts: The tree, parents before children.
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
        """Return what it takes to send from each of `src` to the one of `dst` at the same place, all at once.

        Args:
            src: Global ranks.
            dst: Global ranks; where they are the senders themselves, nothing is sent.
            weights: How many times the bytes each message has; once where None.
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
            # A way that ended further up repeats its last part with the number of no part.
            apart = up != down
            for ends in (up, down):
                crossed = apart & (ends < self._num_parts)
                ends = np.where(crossed, ends, 0)
                latency += np.where(crossed, self._latency[ends], 0.0)
                slowest = max(slowest, float((self._loads(ends, crossed, weights) * self._s_per_byte).max()))
        return Cost(float(latency.max()), slowest)

    def _loads(self, ends: Ranks, crossed: NDArray[np.bool_], weights: Floats | None) -> Floats:
        """Return how many messages cross the link (or memory) of each part."""
        shares = crossed.astype(np.float64) if weights is None else crossed * weights
        loads: Floats = np.bincount(ends, weights=shares, minlength=self._num_parts).astype(np.float64)
        return loads

    def everyone_to_everyone(self, groups: Ranks) -> Cost:
        """Return what it takes if every rank sends to every other of its group, in whatever order.

        Args:
            groups: The groups, all of one size, as the rows of an array.

        Returns:
            The latency of one message, and the seconds per byte that each rank sends to each other.
        """
        num_groups, size = groups.shape
        row = np.repeat(np.arange(num_groups), size)
        slowest, latency = 0.0, 0.0
        leaves = self._leaf[groups].reshape(-1)
        # Of the members of a group, those on one part send to each other through its memory, and out to all the rest.
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
    """Return the ways as the columns of an array; one that ends early goes on with a number of its own, of no part."""
    depth = max(map(len, ways))
    padded = np.empty((depth, len(ways)), dtype=np.int64)
    for number, way in enumerate(ways):
        padded[: len(way), number] = way
        padded[len(way) :, number] = len(ways) + number
    return padded


def _counted(row: Ranks, part: Ranks, num_parts: int) -> tuple[Ranks, Ranks]:
    """Return the part, and the number of members there, of each group and part that have any."""
    keys, counts = np.unique(row * num_parts + part, return_counts=True)
    return keys % num_parts, counts
