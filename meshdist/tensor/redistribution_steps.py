"""The steps of a redistribution: each is at most one collective between two layouts, and knows what it sends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout, number_in
from meshdist.tensor.rank_blocks import Counts, RankBlocks, block_edges, numbers_of, wanted_of

Coordinate: TypeAlias = "tuple[int, ...]"
Block: TypeAlias = "tuple[slice, ...]"


def overlap(one: Block, other: Block) -> Block | None:
    """Return the common part of two blocks; None where it is empty."""
    common = []
    for a, b in zip(one, other, strict=True):
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        if start >= stop:
            return None
        common.append(slice(start, stop))
    return tuple(common)


def relative_to(part: Block, block: Block) -> Block:
    """Return where a part of the whole array is in a block of it."""
    return tuple(slice(one.start - of.start, one.stop - of.start) for one, of in zip(part, block, strict=True))


class Elements(NamedTuple):
    """The numbers of elements that each rank holds, by coordinate: before a step, after it, and at both times."""

    old: Counts
    new: Counts
    kept: Counts


@dataclass(frozen=True, eq=False)
class Step:
    """One step between two layouts.

    Attributes:
        source, target: The layouts before and after.
        axes: The axes along which the ranks differ that take part, ascending.
        collective: The name of the collective; "" for none.
        copies: How many copies of the blocks before and after exist at a time.
    """

    source: ArrayLayout
    target: ArrayLayout
    axes: tuple[int, ...]

    collective: ClassVar[str] = ""
    copies: ClassVar[int] = 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks that take part together."""
        return math.prod(self.source.mesh_shape[axis] for axis in self.axes)

    def elements(self, before: RankBlocks | None = None, after: RankBlocks | None = None) -> Elements:
        """Return what each rank holds; `before` and `after` are the blocks of the two layouts, if they are known."""
        before, after = before or RankBlocks(self.source), after or RankBlocks(self.target)
        return Elements(before.num_elements(), after.num_elements(), before.num_common(after))

    def received(self, elements: Elements) -> Counts:
        """Return the number of elements that each rank receives, by coordinate."""
        return np.zeros_like(elements.old)

    def sent(self, elements: Elements) -> Counts:
        """Return the number of elements that each rank sends, by coordinate."""
        return np.zeros_like(elements.old)


class Slice(Step):
    """Replicate to Shard along `axes`: every rank keeps its part of what it holds."""

    def __str__(self) -> str:
        return "slice"


class Zero(Step):
    """Replicate to Partial along `axes`.

    For a sum, the ranks at coordinate 0 keep the array and the others hold zeros; for a product ones. For the other
    reductions, all keep it.
    """

    def __str__(self) -> str:
        return "keep on the first ranks"


@dataclass(frozen=True, eq=False)
class AllGather(Step):
    """Shard to Replicate along axes that cut each of `dims` innermost."""

    dims: tuple[int, ...]
    collective = "all_gather"

    def __str__(self) -> str:
        return f"all_gather of {'dim' if len(self.dims) == 1 else 'dims'} {', '.join(map(str, self.dims))}"

    def received(self, elements: Elements) -> Counts:
        return elements.new - elements.old

    def sent(self, elements: Elements) -> Counts:
        return (self.num_ranks - 1) * elements.old


@dataclass(frozen=True, eq=False)
class AllReduce(Step):
    """Partial(op) to Replicate along `axes`."""

    op: str
    collective = "all_reduce"

    def __str__(self) -> str:
        return f"all_reduce ({self.op})"

    def received(self, elements: Elements) -> Counts:
        # A reduce_scatter and an all_gather of shares.
        return -(-2 * (self.num_ranks - 1) * elements.old // self.num_ranks)

    sent = received


@dataclass(frozen=True, eq=False)
class ReduceScatter(Step):
    """Partial(op) to Shard(dim), innermost, along `axes`."""

    op: str
    dim: int
    collective = "reduce_scatter"

    def __str__(self) -> str:
        return f"reduce_scatter ({self.op}) of dim {self.dim}"

    def received(self, elements: Elements) -> Counts:
        return (self.num_ranks - 1) * elements.new

    def sent(self, elements: Elements) -> Counts:
        return elements.old - elements.new


class Pairwise(Step):
    """Ranks that differ along `axes` send each other the intersections of their blocks before and after.

    The ranks that differ along `held` hold different blocks. Those that differ along `spread` alone hold the same, and
    share the work: rank (h, s), numbered along `held` and along `spread`, gets what rank h' holds from
    (h', s + h - h' mod the ranks along `spread`). So it gets at most one part for each h', and sends at most one for
    each h.
    """

    collective = "all_to_all"
    copies = 2  # the messages are copies

    @property
    def held(self) -> tuple[int, ...]:
        """The axes along which the ranks hold different blocks."""
        raise NotImplementedError

    @property
    def spread(self) -> tuple[int, ...]:
        """The axes along which the ranks hold the same."""
        return ()

    def received(self, elements: Elements) -> Counts:
        return elements.new - elements.kept

    def sent(self, elements: Elements) -> Counts:
        # Rank (h, s) sends to the (h', s') with h' + s' = h + s modulo the ranks along `spread`.
        shape = self.source.mesh_shape
        total = math.prod(shape[axis] for axis in self.spread)
        weights = {}
        for axes in (self.held, self.spread):
            for at, axis in enumerate(axes, 1):
                weights[axis] = math.prod(shape[inner] for inner in axes[at:])
        wanted = wanted_of(self.source, self.target, weights, total)
        block = np.zeros((1,) * len(shape), np.int64)
        for dim, numbers in enumerate(RankBlocks(self.source).numbers):
            block = block * (len(block_edges(self.source, dim)) - 1) + numbers
        class_ = (numbers_of(self.held, shape) + numbers_of(self.spread, shape)) % total
        sent: Counts = wanted[block, class_] - elements.kept
        return sent

    def parts_from(self, coordinate: Coordinate) -> list[tuple[int, Block]]:
        """Return what the rank at `coordinate` gets: the sender's number among `axes`, and the part of the array."""
        return self._parts(coordinate, self.target.index(coordinate), self.source)

    def parts_to(self, coordinate: Coordinate) -> list[tuple[int, Block]]:
        """Return what the rank at `coordinate` sends: the number of the receiver among `axes`, and the part."""
        return self._parts(coordinate, self.source.index(coordinate), self.target)

    def _parts(self, coordinate: Coordinate, own: Block, layout: ArrayLayout) -> list[tuple[int, Block]]:
        """Return the parts of the block `own` that others hold in `layout`: the number of each peer, and the part."""
        shape = self.source.mesh_shape
        own_held, own_spread = number_in(self.held, coordinate, shape), number_in(self.spread, coordinate, shape)
        held = np.arange(math.prod(shape[axis] for axis in self.held))
        spread = (own_spread + own_held - held) % math.prod(shape[axis] for axis in self.spread)
        peers: list[Counts] = [np.full_like(held, place) for place in coordinate]
        for axes, number in ((self.held, held), (self.spread, spread)):
            for axis in reversed(axes):
                number, peers[axis] = np.divmod(number, shape[axis])
        common = held != own_held
        starts, stops = [], []
        for dim, part in enumerate(own):
            edges = block_edges(layout, dim)
            block = np.broadcast_to(number_in(layout.axes_of(dim), peers, shape), held.shape)
            starts.append(np.maximum(edges[block], part.start))
            stops.append(np.minimum(edges[block + 1], part.stop))
            common &= starts[-1] < stops[-1]
        (found,) = np.nonzero(common)
        numbers = number_in(self.axes, peers, shape)
        found = found[np.argsort(numbers[found])]
        rows = [
            map(slice, start[found].tolist(), stop[found].tolist()) for start, stop in zip(starts, stops, strict=True)
        ]
        return list(zip(numbers[found].tolist(), zip(*rows, strict=True), strict=True))


@dataclass(frozen=True, eq=False)
class AllToAll(Pairwise):
    """Shard(from_dim) to Shard(to_dim) along an axis that cuts innermost before and after."""

    from_dim: int
    to_dim: int

    def __str__(self) -> str:
        return f"all_to_all from dim {self.from_dim} to dim {self.to_dim}"

    @property
    def held(self) -> tuple[int, ...]:
        return self.axes


@dataclass(frozen=True, eq=False)
class Exchange(Pairwise):
    """Any cuts to any other cuts, among the ranks that differ along `axes` only.

    Attributes:
        spread_axes: Those of the axes along which the ranks hold the same before.
    """

    spread_axes: tuple[int, ...]

    def __str__(self) -> str:
        return "all_to_all of blocks"

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(axis for axis in self.axes if axis not in self.spread_axes)

    @property
    def spread(self) -> tuple[int, ...]:
        return self.spread_axes
