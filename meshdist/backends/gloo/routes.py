"""What each data movement moves: its route, and where its few bytes would lie in the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshdist.arrays import Array
from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import blocks_of, flat
from meshdist.collectives.algorithms.pairwise import split_blocks

if TYPE_CHECKING:
    from meshdist.backends.gloo.arena import Arena

Blocks: TypeAlias = "Sequence[Array | None]"
# Given the arena and which of the two slots: an array in a slot, a list of such, or None for nothing.
Places: TypeAlias = "Callable[[Arena, int], Any]"


@dataclass(frozen=True)
class Route:
    """What a collective moves: for each other rank, the block given to it and the block taken from it.

    Attributes:
        give: From what is sent, the flat block for each rank; the same one for all where `shared`. None for nothing.
        take: From what is received, the flat block from each rank.
        shared: All ranks take the same block.
        longest: Bytes of the longest block of any rank. None where only the ranks together know, from comparing their
            split sizes.
        put_bytes: The most that a rank would put into its slot, were all to go there at once; None if unknown.
        puts: Where in its slot a rank puts what it sends: an array of the same shape, or a list of such.
        takes: Where a rank finds what it receives; an array may be of another shape with the same elements.
        giver: The one rank that gives something; None where all do.
        written: The part of a block that its giver writes, where it can, and its taker does not read: so that what
            there is to copy is divided between the ranks.
        row_bytes, unit: What messages count blocks in, where the ranks compare them.
    """

    give: Callable[[Buffers], Blocks]
    take: Callable[[Buffers], Blocks]
    shared: bool
    longest: int | None
    put_bytes: int | None
    puts: Places
    takes: Places
    giver: int | None = None
    written: float = 0
    row_bytes: int = 1
    unit: str = "bytes"


def array_of(buffers: Buffers) -> Array:
    """Return the one array of a checked call."""
    assert isinstance(buffers, np.ndarray)
    return buffers


def broadcast(call: Call) -> Route:
    """All take what the root gives."""
    rank, size, root = call.rank, call.size, call.root
    assert root is not None
    array = array_of(call.recv)
    dtype, shape = array.dtype, array.shape

    def at_root(arena: Arena, use: int) -> Array:
        return arena.slot(use, root, dtype, shape)

    def nothing(arena: Arena, use: int) -> None:
        return None

    return Route(
        give=lambda send: [flat(send) if rank == root != peer else None for peer in range(size)],
        take=lambda recv: [flat(recv) if rank != root == peer else None for peer in range(size)],
        shared=True,
        longest=array.nbytes,
        put_bytes=array.nbytes,
        puts=at_root if rank == root else nothing,
        takes=nothing if rank == root else at_root,
        giver=root,
        written=1 / size,
    )


def all_gather(call: Call) -> Route:
    """All take what each gives: the blocks in a list or, stacked, in one array."""
    rank, size = call.rank, call.size
    as_list = isinstance(call.recv, list)
    blocks = call.recv if isinstance(call.recv, list) else blocks_of(call.recv, size)
    dtype, shapes = blocks[0].dtype, [block.shape for block in blocks]
    shape = array_of(call.send).shape
    longest = max(block.nbytes for block in blocks)

    def takes(arena: Arena, use: int) -> Any:
        if not as_list:
            return arena.stacked(use, dtype, shapes[0])
        return [arena.slot(use, peer, dtype, shapes[peer]) for peer in range(size)]

    return Route(
        give=lambda send: [flat(send)] * size,
        take=lambda recv: blocks_of(recv, size),
        shared=True,
        longest=longest,
        put_bytes=longest,
        puts=lambda arena, use: arena.slot(use, rank, dtype, shape),
        takes=takes,
    )


def gather(call: Call) -> Route:
    """The root takes what each gives."""
    rank, size, root = call.rank, call.size, call.root
    array = array_of(call.send)
    dtype, shape = array.dtype, array.shape
    shapes = [block.shape for block in call.recv] if isinstance(call.recv, list) else []

    def takes(arena: Arena, use: int) -> Any:
        return [arena.slot(use, peer, dtype, shapes[peer]) for peer in range(size)] if rank == root else None

    return Route(
        give=lambda send: [flat(send)] * size,
        take=lambda recv: blocks_of(recv, size) if rank == root else [None] * size,
        shared=True,
        longest=array.nbytes,
        put_bytes=array.nbytes,
        puts=lambda arena, use: arena.slot(use, rank, dtype, shape),
        takes=takes,
        written=1,
    )


def scatter(call: Call) -> Route:
    """Each takes what the root has for it."""
    rank, size, root = call.rank, call.size, call.root
    assert root is not None
    array = array_of(call.recv)
    dtype, shape, num_bytes = array.dtype, array.shape, array.nbytes

    def puts(arena: Arena, use: int) -> Any:
        return [arena.slot(use, root, dtype, shape, peer * num_bytes) for peer in range(size)] if rank == root else None

    return Route(
        give=lambda send: blocks_of(send, size) if rank == root else [None] * size,
        take=lambda recv: [flat(recv) if peer == root else None for peer in range(size)],
        shared=False,
        longest=num_bytes,
        put_bytes=size * num_bytes,
        puts=puts,
        takes=lambda arena, use: arena.slot(use, root, dtype, shape, rank * num_bytes),
        giver=root,
    )


def all_to_all(call: Call) -> Route:
    """Each takes from each what is for it; how much that is, they know together."""
    rank, size = call.rank, call.size
    assert isinstance(call.send, list)
    blocks = [(array.shape, array.nbytes) for array in call.send]
    dtype = call.send[0].dtype

    def puts(arena: Arena, use: int) -> list[Array]:
        ends = accumulate(num_bytes for _, num_bytes in blocks)
        return [
            arena.slot(use, rank, dtype, shape, end - num_bytes)
            for (shape, num_bytes), end in zip(blocks, ends, strict=True)
        ]

    return Route(
        give=lambda send: blocks_of(send, size),
        take=lambda recv: blocks_of(recv, size),
        shared=False,
        longest=None,
        put_bytes=None,
        puts=puts,
        takes=lambda arena, use: None,
        row_bytes=dtype.itemsize,
        unit="elements",
    )


def all_to_all_single(call: Call) -> Route:
    """Each takes from each what is for it."""
    rank, size, even = call.rank, call.size, call.splits is None
    rows_to, rows_from = (None, None) if call.splits is None else call.splits
    array = array_of(call.send)
    dtype, shape, block = array.dtype, array.shape, array.size // size
    return Route(
        give=lambda send: split_blocks(array_of(send), rows_to, size),
        take=lambda recv: split_blocks(array_of(recv), rows_from, size),
        shared=False,
        longest=block * dtype.itemsize if even else None,
        put_bytes=array.nbytes if even else None,
        puts=lambda arena, use: arena.slot(use, rank, dtype, shape),
        takes=lambda arena, use: arena.stacked(use, dtype, (block,), rank * block * dtype.itemsize),
        row_bytes=max(1, array[:1].nbytes),
        unit="rows",
    )
