"""Reductions of more bytes than a slot holds: through the slots, chunk by chunk.

The plans differ in which rank reduces a chunk, and so in the number of steps for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import ReduceOp, identity, quiet_runner
from meshdist.backends.gloo.shm.barrier_plans import NO_ROW, InChunks, Run, SlotCopy, StepCopies, chunks_of_blocks
from meshdist.backends.gloo.shm.copying import Place, places_in
from meshdist.backends.gloo.shm.flag_barrier import BarrierWait
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.backends.gloo.shm.single_copy import address_of
from meshdist.backends.gloo.shm.tuned_plan import Ways, chunks_of
from meshdist.collectives.algorithms.blocks import flat, reduce_in_rank_order
from meshdist.collectives.dataflow import ReductionSpec, ScanSpec, array_of
from meshdist.runtime.call import Buffers, Call

# Up to this many ranks, each reduces whole chunks for itself: two ranks add twice as much as if they shared the work,
# but take one step for a chunk and move each element once, which took a quarter to a third less time.
RANKS_ALONE = 2
# Up to this many, in a reduce to one rank, and in calls of so many bytes: 4 ranks on 2 cores took eight tenths of the
# time of sharing the work, or half of it where the cores had no common cache.
_MOST_RANKS_ALONE, _ALONE_BYTES = 4, 4 << 20
# Their chunk: so much is read from the common cache, and not from that of the core that wrote it. In chunks of 256 KiB,
# 1 MiB took 1.7 times as long on 2 ranks, and 64 MiB a tenth longer.
_WHOLE_CHUNK_BYTES = 1 << 20
_WHOLE_CHUNKS = 256 << 10, 512 << 10  # others to try
# Sharing the work is faster for dtypes that the processor adds one by one: half and long double precision, and those
# that are not NumPy's own.
_QUICK_KINDS, _SLOW_CODES = "biufc", "egG"


_PART = "each rank reduces a part, in "


def ways_in_chunks(shm: ShmGroup, spec: ReductionSpec) -> Ways[ReductionSpec]:
    """Return the ways to reduce chunk by chunk, beginning with the default."""
    slot_bytes, size = shm.region.slots.slot_bytes, shm.backend.size
    if spec.keeps:
        chunks = dict.fromkeys((slot_bytes, min(slot_bytes, _WHOLE_CHUNK_BYTES)))
        return {f"{_PART}{chunks_of(chunk)}": partial(ReduceOwnSegments, chunk_bytes=chunk) for chunk in chunks}
    chunks = dict.fromkeys(min(slot_bytes, chunk) for chunk in (_WHOLE_CHUNK_BYTES, *_WHOLE_CHUNKS))
    whole = {
        f"each rank reduces all, in {chunks_of(chunk)}": partial(ReduceWholeChunks, chunk_bytes=chunk)
        for chunk in chunks
    }
    segments: Ways[ReductionSpec] = {f"{_PART}{chunks_of(slot_bytes)}": ReduceInSegments}
    if _reduces_alone(spec, size):
        return {**whole, **segments}
    return {**segments, **whole} if size <= _MOST_RANKS_ALONE else segments


def _reduces_alone(spec: ReductionSpec, num_ranks: int) -> bool:
    """Return whether each rank that wants the result had better reduce all for itself."""
    is_for_more = spec.taker is not None or spec.put_bytes >= _ALONE_BYTES
    most_ranks = _MOST_RANKS_ALONE if is_for_more else RANKS_ALONE
    return num_ranks <= most_ranks and is_added_quickly(spec.dtype)


def is_added_quickly(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _QUICK_KINDS and dtype.char not in _SLOW_CODES and dtype.isbuiltin != 2  # of an extension


class ReduceByChunk(InChunks):
    def __init__(self, shm: ShmGroup, call: Call) -> None:
        super().__init__(shm.barrier, shm.backend, call)
        assert call.op is not None
        self._op = call.op
        self._run = quiet_runner()
        self._rank = call.rank
        self._wants = call.root in (None, call.rank)
        # The result may overwrite this rank's input after the first two inputs are combined. But NumPy rounds the
        # product of two complex numbers differently if it takes the place of one, and all ranks are to have the same.
        is_complex = call.op is ReduceOp.PRODUCT and array_of(call.recv).dtype.kind == "c"
        self._copies_own = call.rank >= 2 or is_complex

    def _reduced(self, copies: StepCopies, rows: list[list[Array]], own: tuple[int, int, int]) -> StepCopies:
        """Add the reduction of rows; `own` as in `StepCopies`."""
        part = rows[0][0]
        return copies._replace(
            op=self._op.value,
            kind=part.dtype.kind,
            itemsize=part.itemsize,
            num_rows=len(rows[0]),
            rows=[[address_of(row) for row in each] for each in rows],
            num_elements=part.size,
            own=own,
        )

    def _unchanging(self, own: Array) -> Array:
        """Return part of this rank's input, as it stays while the result overwrites it."""
        return own.copy() if self._copies_own else own

    def _combine(self, sources: list[Array], total: Array) -> None:
        reduce_in_rank_order(self._run, self._op, sources, len(sources), total)


class ReduceWholeChunks(ReduceByChunk):
    """For few ranks: every rank that wants the result reduces whole chunks for itself."""

    def __init__(self, shm: ShmGroup, call: Call, spec: ReductionSpec, chunk_bytes: int) -> None:
        super().__init__(shm, call)
        self._spec = spec
        shm.reserve(min(spec.put_bytes, chunk_bytes))
        self._chunk = chunk_bytes // spec.dtype.itemsize
        self.chunk_bytes = self._chunk * spec.dtype.itemsize
        self._slots = [
            [shm.region.slots.slot(phase, peer, spec.dtype, (self._chunk,)) for peer in range(call.size)]
            for phase in (0, 1)
        ]
        self._gives = spec.gives

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        given, taken = flat(send), flat(recv)
        for begin in range(0, given.size, self._chunk):
            own = given[begin : begin + self._chunk]
            slots = [slot[: own.size] for slot in self._slots[self.barrier.flip()]]
            if self._gives:
                self.barrier.put(slots[self._rank], own)
            yield self.arrive()
            if self._wants:
                slots[self._rank] = self._unchanging(own)
                self._combine(slots, taken[begin : begin + self._chunk])

    def runs(self) -> tuple[list[Run], tuple[int, int]]:
        spec, runs = self._spec, []
        for count, (size,) in chunks_of_blocks([spec.put_bytes], spec.put_bytes, self.chunk_bytes):
            rows = [[slot[: size // spec.dtype.itemsize] for slot in slots] for slots in self._slots]
            puts = [[SlotCopy(0, 0, size, address_of(each[self._rank]))] * self._gives for each in rows]
            copies = StepCopies(rows, 1, int(self._wants), puts, [[], []])
            runs.append(Run(self._reduced(copies, rows, (self._rank, 0, 0)) if self._wants else copies, None, count))
        return runs, (1, int(self._wants))


class ScanInChunks(ReduceByChunk):
    """For few ranks: each reduces, chunk by chunk, the inputs of the ranks before it, and its own unless excluded."""

    def __init__(self, shm: ShmGroup, call: Call, spec: ScanSpec) -> None:
        super().__init__(shm, call)
        array = array_of(call.recv)
        self._chunk = min(shm.region.slots.slot_bytes, _WHOLE_CHUNK_BYTES) // array.itemsize
        self.chunk_bytes, self._num_bytes = self._chunk * array.itemsize, array.nbytes
        shm.reserve(min(array.nbytes, self.chunk_bytes))
        slot, shape = shm.region.slots.slot, (self._chunk,)
        self._slots = [[slot(phase, peer, array.dtype, shape) for peer in range(call.rank + 1)] for phase in (0, 1)]
        self._itemsize = array.itemsize
        # What the first rank gets if its input is excluded.
        count = min(array.size, self._chunk) if spec.excludes and not call.rank else 0
        self._identity = np.full(count, identity(self._op, array.dtype), array.dtype)
        self._excludes, self._wants, self._gives = spec.excludes, spec.excludes or call.rank > 0, spec.gives

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        array = flat(recv)
        for begin in range(0, array.size, self._chunk):
            own = array[begin : begin + self._chunk]
            slots = [slot[: own.size] for slot in self._slots[self.barrier.flip()]]
            if self._gives:
                self.barrier.put(slots[self._rank], own)
            yield self.arrive()
            if self._wants:
                self._combine(self._sources(slots, own if self._excludes else self._unchanging(own)), own)

    def runs(self) -> tuple[list[Run], tuple[int, int]]:
        runs, wanted, itemsize = [], int(self._wants), self._itemsize
        for count, (size,) in chunks_of_blocks([self._num_bytes], self._num_bytes, self.chunk_bytes):
            slots = [[slot[: size // itemsize] for slot in of_phase] for of_phase in self._slots]
            puts = [[SlotCopy(0, 0, size, address_of(each[self._rank]))] * self._gives for each in slots]
            copies = StepCopies((slots, self._identity), 1, wanted, puts, [[], []])
            rows = [self._sources(each, each[self._rank]) for each in slots]
            if len(rows[0]) > 1:
                copies = self._reduced(copies, rows, NO_ROW if self._excludes else (self._rank, 0, 0))
            elif wanted:
                copies = copies._replace(takes=[[SlotCopy(0, 0, size, address_of(each[0]))] for each in rows])
            runs.append(Run(copies, None, count))
        return runs, (1, wanted)

    def _sources(self, slots: list[Array], own: Array) -> list[Array]:
        """Return what a chunk of the result is the reduction of; `own` is this rank's input."""
        before = slots[: self._rank]
        return before or [self._identity[: own.size]] if self._excludes else [*before, own]


class ReduceInSegments(ReduceByChunk):
    """For more ranks: each rank reduces its segment of a chunk, and leaves it in its slot for the ranks that want it.

    A chunk has the same layout in the slots as in the arrays, so few copies move it in and the finished segments out:
    on 4 ranks, and with larger slots, this took two thirds of the time of a copy for each segment.
    """

    def __init__(self, shm: ShmGroup, call: Call, spec: ReductionSpec) -> None:
        super().__init__(shm, call)
        shm.reserve(min(spec.put_bytes, shm.region.slots.slot_bytes))
        self._chunk = shm.region.slots.slot_bytes // spec.dtype.itemsize // call.size * call.size
        self.chunk_bytes = self._chunk * spec.dtype.itemsize
        whole, rest = divmod(array_of(call.recv).size, self._chunk)
        counts = [self._chunk] * whole + [rest] * (rest > 0)
        in_slots = {count: [_InSlots(shm, call, spec, phase, count) for phase in (0, 1)] for count in set(counts)}
        self._chunks = [in_slots[count] for count in counts]

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        given, taken, begin = flat(send), flat(recv), 0
        for in_slots in self._chunks:
            slots, piece = in_slots[self.barrier.flip()], slice(begin, begin + self._chunk)
            own = slots.put(given[piece])
            yield self.arrive()
            self._combine([*slots.before, own, *slots.behind], slots.total)
            yield self.arrive()
            if self._wants:
                slots.take(taken[piece])
            begin += self._chunk

    def runs(self) -> tuple[list[Run], tuple[int, int]]:
        runs, received = [], int(self._wants)
        for in_slots, chunks in groupby(self._chunks):
            of_phases = [each.copies() for each in in_slots]
            puts, rows, takes = zip(*of_phases, strict=True)
            first, own = StepCopies(in_slots, 1, 0, puts, [[], []]), in_slots[0].own
            if own.num_bytes:
                totals = address_of(in_slots[0].total), address_of(in_slots[1].total)
                first = self._reduced(first, list(rows), (self._rank, 0, own.offset))._replace(totals=totals)
            second = StepCopies(in_slots, 0, received, [[], []], takes if received else [[], []], is_second=True)
            runs.append(Run(first, second, len(list(chunks))))
        return runs, (1, received)


class _InSlots:
    """A chunk in the slots: this rank's segment in those `before` and `behind` it, and its `total` in its own."""

    def __init__(self, shm: ShmGroup, call: Call, spec: ReductionSpec, phase: int, count: int) -> None:
        length, slot, dtype = -(-count // call.size), shm.region.slots.slot, spec.dtype
        begin, end = (min(rank * length, count) for rank in (call.rank, call.rank + 1))
        segments = [slot(phase, rank, dtype, (end - begin,), begin * dtype.itemsize) for rank in range(call.size)]
        self.before, self.total, self.behind = segments[: call.rank], segments[call.rank], segments[call.rank + 1 :]
        self._own = slice(begin, end)
        self.own = Place(0, begin * dtype.itemsize, (end - begin) * dtype.itemsize)
        self._parts = [
            slot(phase, rank, dtype, (max(0, min(length, count - rank * length)),), rank * length * dtype.itemsize)
            for rank in range(call.size)
        ]
        mine = slot(phase, call.rank, dtype, (count,))
        self._put = shm.barrier.put
        self._others = [(part, mine[part]) for part in (slice(0, begin), slice(end, count)) if part.start < part.stop]
        full, rest = divmod(count, length)
        # Each finished segment is in the slot of its reducer; the last one that is not empty may be shorter.
        self._finished = shm.region.slots.diagonal(phase, dtype, length)[:full]
        self._full = full * length
        self._last = slot(phase, full, dtype, (rest,), self._full * dtype.itemsize) if rest else None

    def copies(self) -> tuple[list[SlotCopy], list[Array], list[SlotCopy]]:
        """Return what is put and taken, and the rows to reduce; that of this rank is not in its slot."""
        begins = accumulate((part.nbytes for part in self._parts), initial=0)
        return (
            [SlotCopy(0, part.start * place.itemsize, place.nbytes, address_of(place)) for part, place in self._others],
            [*self.before, self.total, *self.behind],
            [
                SlotCopy(0, begin, part.nbytes, address_of(part))
                for begin, part in zip(begins, self._parts, strict=False)
                if part.size
            ],
        )

    def put(self, chunk: Array) -> Array:
        """Put the segments of the other ranks into the slot; return this rank's own, which is not copied."""
        for part, place in self._others:
            self._put(place, chunk[part])
        return chunk[self._own]

    def take(self, chunk: Array) -> None:
        chunk[: self._full].reshape(self._finished.shape)[...] = self._finished
        if self._last is not None:
            chunk[self._full :] = self._last


class ReduceOwnSegments(ReduceByChunk):
    """For a reduce_scatter: each rank reduces and keeps its segment of a chunk."""

    def __init__(self, shm: ShmGroup, call: Call, spec: ReductionSpec, chunk_bytes: int) -> None:
        super().__init__(shm, call)
        self._spec = spec
        shm.reserve(chunk_bytes)
        # Slot of rank i, area j: rank i's data for the segment of rank j.
        chunk = chunk_bytes // call.size // spec.dtype.itemsize
        self.chunk_bytes = chunk * spec.dtype.itemsize
        self._places = places_in(call.send, spec.give(call.send))
        self._areas = shm.areas(spec.dtype, chunk)
        self._chunks = [slice(begin, begin + chunk) for begin in range(0, spec.longest, chunk)]

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        rank, give, kept = self._rank, self._spec.give(send), flat(recv)
        for chunk in self._chunks:
            areas = self._areas[self.barrier.flip()]
            for peer, place in enumerate(areas[rank]):
                if peer != rank:
                    part = give[peer][chunk]
                    self.barrier.put(place[: part.size], part)
            yield self.arrive()
            own = give[rank][chunk]
            sources = [own if peer == rank else slot[rank][: own.size] for peer, slot in enumerate(areas)]
            self._combine(sources, kept[chunk])

    def runs(self) -> tuple[list[Run], tuple[int, int]] | None:
        (num_sent, gives), itemsize, rank, runs = self._places, self._spec.dtype.itemsize, self._rank, []
        if gives is None:
            return None
        lengths = [place.num_bytes for place in gives]
        for count, sizes in chunks_of_blocks(lengths, self._spec.longest * itemsize, self.chunk_bytes):
            own = sizes[rank] // itemsize
            rows = [[slot[rank][:own] for slot in areas] for areas in self._areas]
            puts = [
                [
                    gives[peer].copied(size, address_of(areas[rank][peer]))
                    for peer, size in enumerate(sizes)
                    if size and peer != rank
                ]
                for areas in self._areas
            ]
            copies = StepCopies(self._areas, num_sent, 1, puts, [[], []])
            if own:
                copies = self._reduced(copies, rows, (rank, gives[rank].array, gives[rank].offset))
            runs.append(Run(copies, None, count))
        return runs, (num_sent, 1)
