"""Dataflow: what a collective moves, declared once for backends, accounts and the cost model.

Backends with native data movement read its `spec`: the blocks that each rank gives and takes, or the segments that are
    reduced. Accounts read its `traffic`, and the cost model its `name`. A collective without a declared dataflow has
    that of its default algorithm; see `meshdist.collectives.tracing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import identity
from meshdist.collectives import traffic
from meshdist.collectives.algorithms.blocks import blocks_of, flat, shares_of
from meshdist.collectives.algorithms.pairwise import split_blocks
from meshdist.collectives.traffic import Traffic
from meshdist.runtime.call import Buffers, Call

Blocks: TypeAlias = "Sequence[Array | None]"


class Slots(Protocol):
    """Shared memory with slots of each rank, used in turn: `use` is the number of one."""

    def slot(self, use: int, rank: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return an array in a rank's slot, `offset` bytes from its start."""

    def stacked(self, use: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return the arrays at the same place in the slots of all ranks, stacked in one array."""


# Given the slots and which of them: an array in a slot, a list of such, or None for nothing.
Places: TypeAlias = "Callable[[Slots, int], Any]"


class TransferSpec(NamedTuple):
    """The blocks of a data movement: what this rank gives to and takes from each other rank.

    Attributes:
        give: From the input, the flat block for each rank; equal for all if `shared`. None for nothing.
        take: From the output, the flat block from each rank.
        shared: All ranks take the same block.
        longest: Bytes of the longest block of any rank. None if it takes a comparison of the ranks' split sizes.
        given_bytes: The total bytes that each rank gives; None as above.
        puts: The place in its slot where a rank puts its input: an array of the same shape, or a list of arrays.
        takes: The place where a rank finds its output; an array may have a different shape with the same elements.
        giver: The only rank that gives; None if all do.
        taker: The only rank that takes; None if all do.
        written: The share of a block that its sender writes, if it can, instead of its receiver reading it: divides the
            copying between the ranks.
        row_bytes, unit: The unit of block sizes, in the singular, in messages about ranks that disagree.
    """

    give: Callable[[Buffers], Blocks]
    take: Callable[[Buffers], Blocks]
    shared: bool
    longest: int | None
    given_bytes: Sequence[int] | None
    puts: Places
    takes: Places
    giver: int | None = None
    taker: int | None = None
    written: float = 0
    row_bytes: int = 1
    unit: str = "byte"


class ReductionSpec(NamedTuple):
    """The segments of a reduction, one per rank.

    Attributes:
        give: From the input, the flat segment that each rank reduces.
        take: From the output, the place of each rank's finished segment; None for segments not wanted here.
        keeps: Each rank keeps its finished segment for itself. Otherwise input and output have one shape.
        in_place: Each rank has its own memory for its finished segment.
        dtype: The dtype of all segments.
        longest: Elements of the longest segment.
        put_bytes: The bytes of a rank's whole input.
        puts: The place in its slot where a rank puts its input: an array of the same shape, or a list of arrays.
        sources: The inputs of all ranks for this rank's segment, stacked by rank; None if it wants no result.
        begin: The offset in bytes of this rank's own segment in its input.
        taker: The only rank that wants the result; None if all do.
        gives: Another rank needs the input of this one.
    """

    give: Callable[[Buffers], list[Array]]
    take: Callable[[Buffers], Blocks]
    keeps: bool
    in_place: bool
    dtype: np.dtype[Any]
    longest: int
    put_bytes: int
    puts: Places
    sources: Callable[[Slots, int], Array | None]
    begin: int = 0
    taker: int | None = None
    gives: bool = True

    @property
    def reduces_for_all(self) -> bool:
        return not self.keeps and self.taker is None


class ScanSpec(NamedTuple):
    """A reduction over the ranks up to this one, or before it.

    Attributes:
        put_bytes: The bytes of a rank's input.
        puts: The place in its slot where a rank puts its input.
        sources: What this rank's result is the reduction of, stacked by rank: the inputs, or the identity alone if no
            rank is before this one. None if the result is this rank's input.
        excludes: The reduction excludes the input of this rank.
        gives: Another rank needs the input of this one.
    """

    put_bytes: int
    puts: Places
    sources: Callable[[Slots, int], Array | None]
    excludes: bool
    gives: bool


class Dataflow(NamedTuple):
    """What a collective moves.

    Attributes:
        name: The cost model's name; collectives with equal movement share it.
        spec: The movement of a call, from its arrays; None if only the default algorithm defines it.
        traffic: The least traffic of the ranks; None: that of the default algorithm.
        scan: As `spec`, of a scan.
    """

    name: str
    spec: Callable[[Call], TransferSpec | ReductionSpec] | None = None
    traffic: Traffic | None = None
    scan: Callable[[Call], ScanSpec] | None = None


def givers_to(call: Call, giver: int | None, taker: int | None) -> range | None:
    """Return the ranks from which this rank takes, given the only ones that give and take; None: all from all."""
    if giver is None and taker is None:
        return None
    if giver == call.rank or taker not in (None, call.rank):
        return range(0)
    return range(call.size) if giver is None else range(giver, giver + 1)


def array_of(buffers: Buffers) -> Array:
    assert isinstance(buffers, np.ndarray)
    return buffers


def _broadcast(call: Call) -> TransferSpec:
    rank, size, root = call.rank, call.size, call.root
    assert root is not None
    array = array_of(call.recv)
    dtype, shape = array.dtype, array.shape

    def at_root(slots: Slots, use: int) -> Array:
        return slots.slot(use, root, dtype, shape)

    def nothing(slots: Slots, use: int) -> None:
        return None

    return TransferSpec(
        give=lambda send: [flat(send) if rank == root != peer else None for peer in range(size)],
        take=lambda recv: [flat(recv) if rank != root == peer else None for peer in range(size)],
        shared=True,
        longest=array.nbytes,
        given_bytes=[array.nbytes if peer == root else 0 for peer in range(size)],
        puts=at_root if rank == root else nothing,
        takes=nothing if rank == root else at_root,
        giver=root,
        written=1 / size,
    )


def _all_gather(call: Call) -> TransferSpec:
    rank, size = call.rank, call.size
    as_list = isinstance(call.recv, list)
    blocks = call.recv if isinstance(call.recv, list) else blocks_of(call.recv, size)
    dtype, shapes = blocks[0].dtype, [block.shape for block in blocks]
    shape = array_of(call.send).shape
    given_bytes = [block.nbytes for block in blocks]

    def takes(slots: Slots, use: int) -> Any:
        if not as_list:
            return slots.stacked(use, dtype, shapes[0])
        return [slots.slot(use, peer, dtype, shapes[peer]) for peer in range(size)]

    return TransferSpec(
        give=lambda send: [flat(send)] * size,
        take=lambda recv: blocks_of(recv, size),
        shared=True,
        longest=max(given_bytes),
        given_bytes=given_bytes,
        puts=lambda slots, use: slots.slot(use, rank, dtype, shape),
        takes=takes,
    )


def _gather(call: Call) -> TransferSpec:
    rank, size, root = call.rank, call.size, call.root
    array = array_of(call.send)
    dtype, shape = array.dtype, array.shape
    shapes = [block.shape for block in call.recv] if isinstance(call.recv, list) else []

    def takes(slots: Slots, use: int) -> Any:
        return [slots.slot(use, peer, dtype, shapes[peer]) for peer in range(size)] if rank == root else None

    return TransferSpec(
        give=lambda send: [flat(send)] * size,
        take=lambda recv: blocks_of(recv, size) if rank == root else [None] * size,
        shared=True,
        longest=array.nbytes,
        given_bytes=[array.nbytes] * size,
        puts=lambda slots, use: slots.slot(use, rank, dtype, shape),
        takes=takes,
        taker=root,
        written=1,
    )


def _scatter(call: Call) -> TransferSpec:
    rank, size, root = call.rank, call.size, call.root
    assert root is not None
    array = array_of(call.recv)
    dtype, shape, num_bytes = array.dtype, array.shape, array.nbytes

    def puts(slots: Slots, use: int) -> Any:
        return [slots.slot(use, root, dtype, shape, peer * num_bytes) for peer in range(size)] if rank == root else None

    return TransferSpec(
        give=lambda send: blocks_of(send, size) if rank == root else [None] * size,
        take=lambda recv: [flat(recv) if peer == root else None for peer in range(size)],
        shared=False,
        longest=num_bytes,
        given_bytes=[size * num_bytes if peer == root else 0 for peer in range(size)],
        puts=puts,
        takes=lambda slots, use: slots.slot(use, root, dtype, shape, rank * num_bytes),
        giver=root,
    )


def _all_to_all(call: Call) -> TransferSpec:
    """The sizes of blocks are known only after a comparison of all ranks."""
    rank, size = call.rank, call.size
    assert isinstance(call.send, list)
    blocks = [(array.shape, array.nbytes) for array in call.send]
    dtype = call.send[0].dtype

    def puts(slots: Slots, use: int) -> list[Array]:
        ends = accumulate(num_bytes for _, num_bytes in blocks)
        return [
            slots.slot(use, rank, dtype, shape, end - num_bytes)
            for (shape, num_bytes), end in zip(blocks, ends, strict=True)
        ]

    return TransferSpec(
        give=lambda send: blocks_of(send, size),
        take=lambda recv: blocks_of(recv, size),
        shared=False,
        longest=None,
        given_bytes=None,
        puts=puts,
        takes=lambda slots, use: None,
        row_bytes=dtype.itemsize,
        unit="element",
    )


def _all_to_all_single(call: Call) -> TransferSpec:
    rank, size, even = call.rank, call.size, call.splits is None
    rows_to, rows_from = (None, None) if call.splits is None else call.splits
    array = array_of(call.send)
    dtype, shape, block = array.dtype, array.shape, array.size // size
    return TransferSpec(
        give=lambda send: split_blocks(array_of(send), rows_to, size),
        take=lambda recv: split_blocks(array_of(recv), rows_from, size),
        shared=False,
        longest=block * dtype.itemsize if even else None,
        given_bytes=[array.nbytes] * size if even else None,
        puts=lambda slots, use: slots.slot(use, rank, dtype, shape),
        takes=lambda slots, use: slots.stacked(use, dtype, (block,), rank * block * dtype.itemsize),
        row_bytes=max(1, array[:1].nbytes),
        unit="row",
    )


def _all_reduce(call: Call) -> ReductionSpec:
    return _whole(call, wanted=True)


def _reduce(call: Call) -> ReductionSpec:
    return _whole(call, wanted=call.rank == call.root)


def _reduce_scatter(call: Call) -> ReductionSpec:
    """Each rank keeps the segment it reduces; the input is a list or one array."""
    rank, size = call.rank, call.size
    blocks = blocks_of(call.send, size)
    dtype, begins, place = blocks[0].dtype, [0], array_of(call.recv).shape
    for block in blocks:
        begins.append(begins[-1] + block.nbytes)
    shapes: Any = [array.shape for array in call.send] if isinstance(call.send, list) else array_of(call.send).shape

    def puts(slots: Slots, use: int) -> Any:
        if isinstance(shapes, list):
            return [slots.slot(use, rank, dtype, shape, begin) for shape, begin in zip(shapes, begins, strict=False)]
        return slots.slot(use, rank, dtype, shapes)

    return ReductionSpec(
        give=lambda send: blocks_of(send, size),
        take=lambda recv: [flat(recv) if peer == rank else None for peer in range(size)],
        keeps=True,
        in_place=True,
        dtype=dtype,
        longest=max(block.size for block in blocks),
        put_bytes=begins[-1],
        puts=puts,
        sources=lambda slots, use: slots.stacked(use, dtype, place, begins[rank]),
        begin=begins[rank],
    )


def _whole(call: Call, *, wanted: bool) -> ReductionSpec:
    rank, size = call.rank, call.size
    array = array_of(call.recv)
    dtype, shape = array.dtype, array.shape
    return ReductionSpec(
        give=lambda send: shares_of(flat(send), size),
        take=lambda recv: shares_of(flat(recv), size) if wanted else [None] * size,
        keeps=False,
        in_place=wanted and call.root is None,
        dtype=dtype,
        longest=-(-array.size // size),
        put_bytes=array.nbytes,
        puts=lambda slots, use: slots.slot(use, rank, dtype, shape),
        sources=lambda slots, use: slots.stacked(use, dtype, shape) if wanted else None,
        taker=call.root,
        gives=call.root != rank,
    )


def _scan(call: Call) -> ScanSpec:
    return _up_to(call, excludes=False)


def _exscan(call: Call) -> ScanSpec:
    return _up_to(call, excludes=True)


def _up_to(call: Call, *, excludes: bool) -> ScanSpec:
    rank, array = call.rank, array_of(call.recv)
    end = rank + (not excludes)
    dtype, shape, op = array.dtype, array.shape, call.op
    assert op is not None

    def sources(slots: Slots, use: int) -> Array | None:
        if not end:
            return np.full((1, *shape), identity(op, dtype), dtype)
        return slots.stacked(use, dtype, shape)[:end] if rank else None

    return ScanSpec(
        put_bytes=array.nbytes,
        puts=lambda slots, use: slots.slot(use, rank, dtype, shape),
        sources=sources,
        excludes=excludes,
        gives=rank + 1 < call.size,
    )


ALL_REDUCE = Dataflow("all_reduce", _all_reduce, traffic.ALL_REDUCE)
REDUCE = Dataflow("reduce", _reduce, traffic.REDUCE)
REDUCE_SCATTER = Dataflow("reduce_scatter", _reduce_scatter, traffic.REGROUPING)
BROADCAST = Dataflow("broadcast", _broadcast, traffic.BROADCAST)
ALL_GATHER = Dataflow("all_gather", _all_gather, traffic.REGROUPING)
GATHER = Dataflow("gather", _gather, traffic.GATHER)
SCATTER = Dataflow("scatter", _scatter, traffic.EXCHANGE)
ALL_TO_ALL = Dataflow("all_to_all", _all_to_all, traffic.EXCHANGE)
ALL_TO_ALL_SINGLE = Dataflow("all_to_all", _all_to_all_single, traffic.EXCHANGE)
BARRIER = Dataflow("barrier", None, traffic.NOTHING)
SCAN = Dataflow("scan", scan=_scan)
EXSCAN = Dataflow("exscan", scan=_exscan)
SEND = Dataflow("send", None, traffic.MESSAGE)
RECV = Dataflow("send", None, traffic.NOTHING)
