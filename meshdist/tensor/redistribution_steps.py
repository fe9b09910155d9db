"""The steps of a redistribution: each is at most one collective between two layouts, and knows what it sends."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import ClassVar, TypeAlias

from meshdist.tensor.array_layout import ArrayLayout, number_in

Coordinate: TypeAlias = "tuple[int, ...]"
Block: TypeAlias = "tuple[slice, ...]"


def num_elements(block: Block) -> int:
    """Return the number of elements of a block, given by slices of the whole array."""
    return math.prod(part.stop - part.start for part in block)


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

    @property
    def sends_once(self) -> bool:
        """Whether what a rank sends follows from its blocks before and after, whatever the others get."""
        return True

    def received_of(self, old: Block, new: Block) -> int:
        """Return the number of elements that a rank receives, given its blocks before and after."""
        return 0

    def sent_of(self, old: Block, new: Block) -> int:
        """Return the number of elements that a rank sends, given its blocks before and after."""
        return 0

    def received(self, coordinate: Coordinate) -> int:
        """Return the number of elements that the rank at `coordinate` receives."""
        return self.received_of(self.source.index(coordinate), self.target.index(coordinate))

    def sent(self, coordinate: Coordinate) -> int:
        """Return the number of elements that the rank at `coordinate` sends."""
        return self.sent_of(self.source.index(coordinate), self.target.index(coordinate))


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

    def received_of(self, old: Block, new: Block) -> int:
        return num_elements(new) - num_elements(old)

    def sent_of(self, old: Block, new: Block) -> int:
        return (self.num_ranks - 1) * num_elements(old)


@dataclass(frozen=True, eq=False)
class AllReduce(Step):
    """Partial(op) to Replicate along `axes`."""

    op: str
    collective = "all_reduce"

    def __str__(self) -> str:
        return f"all_reduce ({self.op})"

    def received_of(self, old: Block, new: Block) -> int:
        # A reduce_scatter and an all_gather of shares.
        return -(-2 * (self.num_ranks - 1) * num_elements(old) // self.num_ranks)

    sent_of = received_of


@dataclass(frozen=True, eq=False)
class ReduceScatter(Step):
    """Partial(op) to Shard(dim), innermost, along `axes`."""

    op: str
    dim: int
    collective = "reduce_scatter"

    def __str__(self) -> str:
        return f"reduce_scatter ({self.op}) of dim {self.dim}"

    def received_of(self, old: Block, new: Block) -> int:
        return (self.num_ranks - 1) * num_elements(new)

    def sent_of(self, old: Block, new: Block) -> int:
        return num_elements(old) - num_elements(new)


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

    def received_of(self, old: Block, new: Block) -> int:
        kept = overlap(old, new)
        return num_elements(new) - (0 if kept is None else num_elements(kept))

    @cached_property
    def sends_once(self) -> bool:
        # Every element goes to one rank: none holds the same as another, and none gets the same.
        cutting = {axis for cut in self.target.cuts if cut is not None for axis in cut.axes}
        return not self.spread and cutting.issuperset(self.axes)

    def sent(self, coordinate: Coordinate) -> int:
        if self.sends_once:
            old = self.source.index(coordinate)
            kept = overlap(old, self.target.index(coordinate))
            return num_elements(old) - (0 if kept is None else num_elements(kept))
        return sum(num_elements(part) for _, part in self.parts_to(coordinate))

    def parts_from(self, coordinate: Coordinate) -> list[tuple[int, Block]]:
        """Return what the rank at `coordinate` gets: the sender's number among `axes`, and the part of the array."""
        wanted = self.target.index(coordinate)
        peers = self._peers(coordinate, 1, self._numbers(self.source, wanted))
        return self._parts((peer, overlap(wanted, self.source.index(peer))) for peer in peers)

    def parts_to(self, coordinate: Coordinate) -> list[tuple[int, Block]]:
        """Return what the rank at `coordinate` sends: the number of the receiver among `axes`, and the part."""
        own = self.source.index(coordinate)
        peers = self._peers(coordinate, -1, self._numbers(self.target, own))
        return self._parts((peer, overlap(own, self.target.index(peer))) for peer in peers)

    def _numbers(self, layout: ArrayLayout, part: Block) -> range | None:
        """Return the places along the only axis of the step at which blocks of `layout` overlap a part of the array.

        None: any, since there are several axes, or others cut the same dimension.
        """
        if len(self.held) != 1 or self.spread:
            return None
        for dim, cut in enumerate(layout.cuts):
            if cut is not None and cut.axes == self.held:
                starts = layout.starts(dim)
                return range(max(bisect_right(starts, part[dim].start) - 1, 0), bisect_left(starts, part[dim].stop))
        return None

    def _peers(self, coordinate: Coordinate, sign: int, numbers: range | None) -> Iterator[Coordinate]:
        """Return the coordinates of the other ranks from which this one gets (sign 1), or to which it sends (-1).

        Of a step along one axis, `numbers` are the places along it that matter; None: all.
        """
        shape = self.source.mesh_shape
        if numbers is not None:
            (axis,) = self.held
            for number in numbers:
                if number != coordinate[axis]:
                    yield (*coordinate[:axis], number, *coordinate[axis + 1 :])
            return
        own_held, own_spread = number_in(self.held, coordinate, shape), number_in(self.spread, coordinate, shape)
        total = math.prod(shape[axis] for axis in self.spread)
        for number, places in enumerate(product(*(range(shape[axis]) for axis in self.held))):
            if number == own_held:
                continue
            peer = list(coordinate)
            for axis, place in zip(self.held, places, strict=True):
                peer[axis] = place
            rest = (own_spread + own_held - number) % total
            for axis in reversed(self.spread):
                rest, peer[axis] = divmod(rest, shape[axis])
            yield tuple(peer)

    def _parts(self, parts: Iterator[tuple[Coordinate, Block | None]]) -> list[tuple[int, Block]]:
        shape = self.source.mesh_shape
        found = [(number_in(self.axes, peer, shape), part) for peer, part in parts if part is not None]
        return sorted(found, key=lambda pair: pair[0])


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
