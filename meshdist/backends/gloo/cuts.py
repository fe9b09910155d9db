"""How each reduction is cut into a segment for each rank, and where its few bytes would lie in the slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.gloo.routes import Blocks, Places, array_of
from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import blocks_of, flat, shares_of

if TYPE_CHECKING:
    from meshdist.backends.gloo.arena import Arena


@dataclass(frozen=True)
class Cut:
    """How a reduction is cut.

    Attributes:
        give: From what is sent, the flat segment that each rank reduces.
        take: From what is received, where each rank's finished segment goes; None for those not wanted here.
        keeps: Each rank keeps its finished segment, and no other rank takes it.
        in_place: Each rank has room of its own for its finished segment.
        dtype: Of all segments.
        longest: Elements of the longest segment.
        put_bytes: What a rank would put into its slot, were all to go there at once.
        puts: Where in its slot a rank puts what it sends: an array of the same shape, or a list of such.
        sources: Where a rank finds what all ranks put for it to reduce, stacked by rank; None where it wants no result.
    """

    give: Callable[[Buffers], list[Array]]
    take: Callable[[Buffers], Blocks]
    keeps: bool
    in_place: bool
    dtype: np.dtype[Any]
    longest: int
    put_bytes: int
    puts: Places
    sources: Callable[[Arena, int], Array | None]


def all_reduce(call: Call) -> Cut:
    """All want all segments."""
    return _whole(call, wanted=True)


def reduce(call: Call) -> Cut:
    """The root wants all segments, the others none."""
    return _whole(call, wanted=call.rank == call.root)


def reduce_scatter(call: Call) -> Cut:
    """Each wants the segment it reduces: the segments come in a list or, stacked, in one array."""
    rank, size = call.rank, call.size
    blocks = blocks_of(call.send, size)
    dtype, begins, place = blocks[0].dtype, [0], array_of(call.recv).shape
    for block in blocks:
        begins.append(begins[-1] + block.nbytes)
    shapes: Any = [array.shape for array in call.send] if isinstance(call.send, list) else array_of(call.send).shape

    def puts(arena: Arena, use: int) -> Any:
        if isinstance(shapes, list):
            return [arena.slot(use, rank, dtype, shape, begin) for shape, begin in zip(shapes, begins, strict=False)]
        return arena.slot(use, rank, dtype, shapes)

    return Cut(
        give=lambda send: blocks_of(send, size),
        take=lambda recv: [flat(recv) if peer == rank else None for peer in range(size)],
        keeps=True,
        in_place=True,
        dtype=dtype,
        longest=max(block.size for block in blocks),
        put_bytes=begins[-1],
        puts=puts,
        sources=lambda arena, use: arena.stacked(use, dtype, place, begins[rank]),
    )


def _whole(call: Call, *, wanted: bool) -> Cut:
    rank, size = call.rank, call.size
    array = array_of(call.recv)
    dtype, shape = array.dtype, array.shape
    return Cut(
        give=lambda send: shares_of(flat(send), size),
        take=lambda recv: shares_of(flat(recv), size) if wanted else [None] * size,
        keeps=False,
        in_place=wanted and call.root is None,
        dtype=dtype,
        longest=-(-array.size // size),
        put_bytes=array.nbytes,
        puts=lambda arena, use: arena.slot(use, rank, dtype, shape),
        sources=lambda arena, use: arena.stacked(use, dtype, shape) if wanted else None,
    )
