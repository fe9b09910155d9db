"""Which rank writes which block of an array: pure arithmetic, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from meshdist.checkpoint.byte_runs import Index, run_bytes, shape_of, whole
from meshdist.checkpoint.stored_types import dtype_of
from meshdist.mesh.layout.axes_and_chunks import chunk_sizes
from meshdist.runtime.rank_text import ranks_text
from meshdist.tensor.array_layout import ArrayLayout, Cut

# What all ranks hold is written by several of them from this size on.
SPLIT_BYTES = 1 << 20
# More runs than this, of less than this: the ranks exchange rows before they write.
MANY_RUNS, SHORT_BYTES = 256, 64 << 10


class Held(NamedTuple):
    """How a rank holds an array.

    Attributes:
        shape: Of the whole array.
        dtype: Its name.
        layout: Over a mesh, as it is written; None: this rank has all of it.
        ranks: The mesh's ranks, numbered in the group, in row-major order; empty without a layout.
        source: Over a mesh, before the ranks exchange rows; `layout` where they exchange none.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: ArrayLayout | None = None
    ranks: tuple[int, ...] = ()
    source: ArrayLayout | None = None

    def __repr__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        if self.source is None:
            return text
        placements, mesh_shape = list(self.source.placements), self.source.mesh_shape
        return f"{text} as {placements} on a mesh {mesh_shape} of {ranks_text(self.ranks)}"

    @property
    def is_whole(self) -> bool:
        """Whether the rank has all of the array."""
        return self.layout is None or self.layout.is_replicated


class Piece(NamedTuple):
    """A block that one rank writes."""

    block: Index
    owner: int


class Mine(NamedTuple):
    """A piece that this rank writes: the array's name, the number of the piece, and what returns its elements."""

    name: str
    number: int
    piece: Piece
    elements: Callable[[], Any]


# The ranks that hold each block of an array, ascending.
Holders: TypeAlias = "dict[Index, tuple[int, ...]]"
# Passes on what is written, as a progress bar does.
Progress: TypeAlias = "Callable[[Iterable[Mine]], Iterable[Mine]]"


def written_layout(layout: ArrayLayout, itemsize: int, by_chunks: bool) -> ArrayLayout:
    """Return the layout in which blocks are written: pending reductions computed, without very short runs of bytes.

    Args:
        layout: That of the array.
        itemsize: The bytes of an element.
        by_chunks: Blocks must be those of a grid of equal chunks.
    """
    layout = layout.resolved()
    blocks = set(blocks_of(layout))
    if by_chunks:
        fits = all(cut is None or _is_grid(cut) for cut in layout.cuts)
    else:
        fits = not any(_has_short_runs(layout.shape, index, itemsize) for index in blocks)
    if fits:
        return layout
    dim = max(range(layout.ndim), key=lambda dim: layout.shape[dim]) if by_chunks else 0
    axes = tuple(range(len(layout.mesh_shape)))
    cuts: list[Cut | None] = [None] * layout.ndim
    cuts[dim] = Cut(axes, chunk_sizes(layout.shape[dim], math.prod(layout.mesh_shape)))
    return ArrayLayout.of_cuts(layout.shape, layout.mesh_shape, cuts, {})


def index_at(layout: ArrayLayout, coordinate: Sequence[int]) -> Index:
    """Return the block of the rank at `coordinate`."""
    return tuple((part.start, part.stop) for part in layout.index(coordinate))


@lru_cache(maxsize=10_000)
def blocks_of(layout: ArrayLayout) -> tuple[Index, ...]:
    """Return the blocks of all ranks of the mesh, in row-major order."""
    return tuple(index_at(layout, coordinate) for coordinate in layout.coordinates())


def block_on(rank: int, held: Held, layout: ArrayLayout | None) -> Index:
    """Return the block of a rank of the group, which holds the array so, in one of its layouts."""
    return whole(held.shape) if layout is None else blocks_of(layout)[held.ranks.index(rank)]


def is_held_once(layout: ArrayLayout) -> bool:
    """Return whether no two ranks hold the same block."""
    cut_axes = {axis for cut in layout.cuts if cut is not None for axis in cut.axes}
    return all(size == 1 or axis in cut_axes for axis, size in enumerate(layout.mesh_shape))


def _is_grid(cut: Cut) -> bool:
    return cut.sizes == chunk_sizes(sum(cut.sizes), len(cut.sizes))


def _has_short_runs(shape: Sequence[int], index: Index, itemsize: int) -> bool:
    length = run_bytes(shape, index, itemsize)
    return 0 < length < SHORT_BYTES and math.prod(shape_of(index)) * itemsize // length > MANY_RUNS


def assign_pieces(held: Mapping[str, Mapping[int, Held]], num_ranks: int, by_chunks: bool) -> dict[str, list[Piece]]:
    """Return who writes what of each array, so that all ranks write about as much.

    Of what several ranks hold, large blocks are cut between them, and a small one is written by the rank that has least
    to write.

    Args:
        held: For each array, by name, how each rank that has it holds it.
        num_ranks: The number of ranks.
        by_chunks: Pieces must be those of a grid of equal chunks.
    """
    loads = [0] * num_ranks
    pieces: dict[str, list[Piece]] = {}
    largest_first = sorted(held, key=lambda name: (-math.prod(next(iter(held[name].values())).shape), name))
    for name in largest_first:
        pieces[name] = []
        first = next(iter(held[name].values()))
        itemsize = dtype_of(first.dtype).itemsize
        for index, owners in holders_of(held[name], first.layout).items():
            nbytes = math.prod(shape_of(index)) * itemsize
            dim = next((dim for dim, rows in enumerate(shape_of(index)) if rows > 1), None)
            is_cut = dim is not None and nbytes >= SPLIT_BYTES and (not by_chunks or index == whole(first.shape))
            if not is_cut or dim is None or len(owners) == 1:
                owner = min(owners, key=lambda rank: (loads[rank], rank))
                loads[owner] += nbytes
                pieces[name] += [Piece(index, owner)] if nbytes else []
                continue
            start = index[dim][0]
            for owner, rows in zip(owners, chunk_sizes(shape_of(index)[dim], len(owners)), strict=True):
                if rows:
                    part = (*index[:dim], (start, start + rows), *index[dim + 1 :])
                    pieces[name].append(Piece(part, owner))
                    loads[owner] += math.prod(shape_of(part)) * itemsize
                start += rows
    return {name: pieces[name] for name in held}


def holders_of(held: Mapping[int, Held], layout: ArrayLayout | None) -> Holders:
    """Return the ranks that hold each block of an array.

    Args:
        held: How each rank holds it.
        layout: As it is written, or before the ranks exchange rows: that of the first rank stands for all.
    """
    if layout is None or layout.is_replicated:
        return {whole(next(iter(held.values())).shape): tuple(sorted(held))}
    blocks = blocks_of(layout)
    places = {ranks: {rank: n for n, rank in enumerate(ranks)} for ranks in {other.ranks for other in held.values()}}
    found: dict[Index, list[int]] = {}
    for rank in sorted(held):
        found.setdefault(blocks[places[held[rank].ranks][rank]], []).append(rank)
    return {index: tuple(ranks) for index, ranks in found.items()}


def check_alike(held: Mapping[str, Mapping[int, Held]]) -> None:
    """Raise ValueError where ranks have different arrays under one name, or no rank has a block.

    Different are arrays of other shapes, dtypes or, if they are not whole on each rank, placements.
    """
    for name, by_rank in held.items():
        rank, first = next(iter(by_rank.items()))
        for other_rank, other in by_rank.items():
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"{name!r} is {first} on rank {rank} and {other} on rank {other_rank}; all ranks must have the same"
                    " array, or mark it as per_rank(array)"
                )
            are_placed_alike = other.layout is first.layout and other.source is first.source
            if not are_placed_alike and not (other.is_whole and first.is_whole):
                raise ValueError(
                    f"{name!r} is {first} on rank {rank} and {other} on rank {other_rank}: these are two arrays of one"
                    " name; give those of each mesh, such as a pipeline stage, a key of their own"
                )
        blocks = holders_of(by_rank, first.layout)
        if sum(math.prod(shape_of(index)) for index in blocks) != math.prod(first.shape):
            raise ValueError(f"{name!r} is {first}, and some ranks of its mesh lack it; all of them must save it")
