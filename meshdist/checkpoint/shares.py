"""Share: what one rank writes of each array, of its own blocks and of rows that it gets from others.

Blocks that would be many short runs of bytes in a file, such as columns, become rows before they are written: the ranks
of their mesh exchange parts of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from meshdist.checkpoint.block_owners import Held, Mine, Piece, block_on, blocks_of
from meshdist.checkpoint.byte_runs import Index, overlap_of, shape_of, within
from meshdist.checkpoint.file_access import Bytes
from meshdist.checkpoint.stored_types import dtype_of
from meshdist.collectives.all_to_all import all_to_all
from meshdist.groups.process_group import ProcessGroup
from meshdist.tensor.array_layout import ArrayLayout


class Part(NamedTuple):
    """A piece that this rank writes.

    Attributes:
        name: The array, as it is stored.
        number: The piece, among those of the array.
        piece: The piece.
        place: Where it is in this rank's block or, after an exchange, in its rows.
    """

    name: str
    number: int
    piece: Piece
    place: tuple[slice, ...]

    def of(self, elements: Any) -> Mine:
        """Return what is written, with these elements."""
        return Mine(self.name, self.number, self.piece, partial(_same, elements))


class Exchange(NamedTuple):
    """An array whose blocks become rows; all ranks of the group exchange it, those without it nothing.

    Attributes:
        name: The array, as it is stored.
        dtype: That of the messages.
        held: How this rank holds it; None: not at all.
        parts: What this rank writes of its rows.
        num_bytes: The bytes of these rows, of which other ranks may write a part, or all.
    """

    name: str
    dtype: np.dtype[Any]
    held: Held | None
    parts: list[Part]
    num_bytes: int

    def rows(self, block: Any, group: ProcessGroup) -> Any:
        """Return this rank's rows, a new array, given its block; all ranks of the group call it.

        A rank that does not hold the array passes None, and gets None.
        """
        nothing = np.empty(0, self.dtype)
        give, take, rows = [nothing] * group.size(), [nothing] * group.size(), None
        if self.held is not None and self.held.layout is not None and self.held.source is not None:
            source, target, ranks = self.held.source, self.held.layout, self.held.ranks
            place = ranks.index(group.rank())
            old, new = blocks_of(source)[place], blocks_of(target)[place]
            rows = np.empty(shape_of(new), self.dtype)
            block = block.astype(self.dtype, copy=False)
            for giver, taker, both in _transfers(source, target):
                if giver == taker == place:
                    rows[within(both, new)] = block[within(both, old)]
                elif giver == place:
                    give[ranks[taker]] = block[within(both, old)]
                elif taker == place:
                    take[ranks[giver]] = rows[within(both, new)]
        all_to_all(take, give, group)
        return rows


@lru_cache(maxsize=10_000)
def _transfers(source: ArrayLayout, target: ArrayLayout) -> list[tuple[int, int, Index]]:
    """Return which rank of a mesh gives which block to which other, for each to get that of the target layout.

    Of ranks that hold the same block, each gives it to about as many.
    """
    holders: dict[Index, list[int]] = {}
    for place, block in enumerate(blocks_of(source)):
        holders.setdefault(block, []).append(place)
    found = []
    for taker, wanted in enumerate(blocks_of(target)):
        for block, places in holders.items():
            both = overlap_of(block, wanted)
            if both is not None:
                found.append((taker if taker in places else places[taker % len(places)], taker, both))
    return found


class Share(NamedTuple):
    """What this rank writes.

    Attributes:
        parts: Of its blocks as they lie.
        exchanges: The arrays that become rows before, the same on all ranks.
    """

    parts: list[Part]
    exchanges: list[Exchange]

    def blocks(self, elements: Mapping[str, Any]) -> Blocks:
        """Return the elements of the share, without a copy, given those of this rank's blocks."""
        return Blocks(
            [elements[part.name][part.place] for part in self.parts],
            [elements.get(exchange.name) for exchange in self.exchanges],
        )


class Blocks(NamedTuple):
    """The elements of a share.

    Attributes:
        parts: Those of each of its parts.
        exchanged: For each of its exchanges this rank's block; None where it has none.
        memory: For each of its exchanges where to put the rows, in place of the block; empty: in new memory.
    """

    parts: Sequence[Any]
    exchanged: Sequence[Any]
    memory: Sequence[Bytes] = ()


def share_of(rank: int, pieces: Mapping[str, Sequence[Piece]], held_by: Mapping[str, Mapping[int, Held]]) -> Share:
    """Return the share of a rank, given the pieces of all ranks and how they hold each array."""
    share = Share([], [])
    for name, listed in pieces.items():
        by_rank = held_by[name]
        held = by_rank.get(rank)
        parts, num_elements = [], 0
        if held is not None:
            block = block_on(rank, held, held.layout)
            num_elements = math.prod(shape_of(block))
            parts = [
                Part(name, number, piece, within(piece.block, block))
                for number, piece in enumerate(listed)
                if piece.owner == rank
            ]
        if any(other.source is not other.layout for other in by_rank.values()):
            dtype = dtype_of(next(iter(by_rank.values())).dtype)
            share.exchanges.append(Exchange(name, dtype, held, parts, num_elements * dtype.itemsize))
        else:
            share.parts.extend(parts)
    return share


def exchanged(share: Share, blocks: Blocks, group: ProcessGroup) -> list[Mine]:
    """Return what this rank writes, after the exchanges, an array at a time; all ranks of the group call it."""
    mine = [part.of(elements) for part, elements in zip(share.parts, blocks.parts, strict=True)]
    for number, (exchange, block) in enumerate(zip(share.exchanges, blocks.exchanged, strict=True)):
        rows = exchange.rows(block, group)
        if rows is not None and blocks.memory:
            kept = as_array(blocks.memory[number], rows.dtype, rows.shape)
            np.copyto(kept, rows)
            rows = kept
        mine += [part.of(rows[part.place]) for part in exchange.parts]
    return mine


def as_array(memory: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return an array at the beginning of some memory."""
    return np.ndarray(shape, dtype, memory.data)


def _same(elements: Any) -> Any:
    return elements
