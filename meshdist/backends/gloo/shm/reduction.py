"""Reductions: all_reduce, reduce, reduce_scatter, scan and exscan.

Few bytes are put into the slots and reduced by every rank for itself. More are cut into a segment for each rank, which
that rank reduces, through the slots chunk by chunk or from the peers' memory and into it. Every element is reduced in
rank order, so the result is the same to the last bit on all ranks and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import ReduceOp, quiet_runner
from meshdist.backends.base import Plan
from meshdist.backends.gloo.shm.barrier_plans import NO_ROW, BarrierPlan, OneStep, SlotCopy, StepCopies
from meshdist.backends.gloo.shm.chunked_reduction import RANKS_ALONE, ScanInChunks, is_added_quickly, ways_in_chunks
from meshdist.backends.gloo.shm.copying import Reduced, SingleCopyPlan
from meshdist.backends.gloo.shm.flag_barrier import BarrierWait, EarlyReturn
from meshdist.backends.gloo.shm.move_plans import copies_of, put
from meshdist.backends.gloo.shm.shared_region import SMALL_GROUP
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.backends.gloo.shm.tuned_plan import ONE_STEP, Ways, fastest
from meshdist.backends.gloo.shm.tuning import LEAST_IN_CHUNKS
from meshdist.backends.gloo.shm.zero_copy import SharedReduce
from meshdist.collectives.algorithms.blocks import flat, reduce_in_rank_order
from meshdist.collectives.dataflow import ALL_REDUCE, ReductionSpec, ScanSpec, array_of, givers_to
from meshdist.collectives.definition import definition_of
from meshdist.runtime.call import Buffers, Call, Signature, each

# Up to this total over all ranks, every rank reduces for itself in one step. Measured on 2 and 4 ranks. More goes
# through the slots: reading the peers' memory instead took a third longer on 2 ranks, and a quarter on 4.
REDUCE_ALONE_BYTES = 1 << 20
# Up to this total, the arrays of a list are reduced in one step. Few ranks reduce longer lists in chunks, of so many
# arrays at most.
_LISTS_BYTES, _LIST_CHUNK_BYTES, _MOST_IN_LIST = 64 << 10, 256 << 10, 512
# From so many bytes on, the core reads the other ranks' memory, and writes there as well: 64 MiB took half of the time
# through the slots on 8 ranks, and as long on 2 and 4; 16 MiB took as long or longer. In a reduce_scatter of a small
# group, whose slots are larger, any number of bytes took 1.1 to 1.7 times as long as through the slots. Without the
# core: from so many ranks and bytes on. 4 and 8 ranks on 2 cores took seven to nine tenths of the time through the
# slots, 2 ranks a third more.
_READ_BYTES, _READING_RANKS, _READ_BYTES_WITHOUT_CORE = 32 << 20, 4, 8 << 20
# Up to this many ranks, each reduces the inputs of all before it; of more, only that of the rank before it, along the
# chain. On 2 cores, a scan of 8 MiB of float32 took a quarter, a third and four tenths of the chain's time on 3, 4 and
# 8 ranks; one of float16, which is added slowly, 1.3, 1.5 and 2.6 times as long.
_SCANNING_RANKS = 8
# From this many ranks on, and up to so many bytes for each of them, one call of NumPy for all slots takes less time
# than a call for each.
_STACKED_RANKS, _STACKED_BYTES = 4, 1024


def plan_reduction(shm: ShmGroup, call: Call, spec: ReductionSpec) -> Plan:
    has_room = spec.put_bytes <= shm.region.slots.slot_bytes
    one_step: Ways[ReductionSpec] = {ONE_STEP: SlotReduce} if has_room else {}
    in_chunks = ways_in_chunks(shm, spec)
    reading: dict[str, Callable[[ShmGroup, Call, ReductionSpec], BarrierPlan]] = {}
    if shm.single_copy and spec.in_place:
        if shm.writes and spec.reduces_for_all:
            reading["each rank reads, reduces and writes a part"] = partial(SingleCopyReduce, written=1)
        reading["each rank reads and reduces a part"] = SingleCopyReduce
    if has_room and spec.put_bytes <= REDUCE_ALONE_BYTES // call.size:
        early = shm.barrier.early_return(givers_to(call, None, spec.taker), spec.put_bytes)
        one_step = {ONE_STEP: partial(SlotReduce, early=early, most_alike=_most_alike(shm, call))}
        ways = {**one_step, **in_chunks, **reading}
        return fastest(shm, call, spec, spec.put_bytes, ways, least_bytes=LEAST_IN_CHUNKS)
    if shm.compiled:
        is_read = spec.put_bytes >= _READ_BYTES and not (spec.keeps and call.size <= SMALL_GROUP)
    else:
        is_read = call.size >= _READING_RANKS and spec.put_bytes >= _READ_BYTES_WITHOUT_CORE
    if is_read:
        ways = {**reading, **in_chunks, **one_step}
    else:
        ways = {**in_chunks, **one_step, **reading}
    ordinary = fastest(shm, call, spec, spec.put_bytes, ways, least_bytes=LEAST_IN_CHUNKS)
    return SharedReduce(shm, call, spec, ordinary)


def plan_scan(shm: ShmGroup, call: Call, spec: ScanSpec) -> Plan | None:
    """Return the plan of a scan through the slots; None for one that goes along the chain of the ranks."""
    # The identity, which the first rank gets if its input is excluded, is in no slot.
    early = None if spec.excludes else shm.barrier.early_return(range(call.rank), spec.put_bytes, in_order=True)
    if spec.put_bytes <= min(REDUCE_ALONE_BYTES // call.size, shm.region.slots.slot_bytes):
        return SlotReduce(shm, call, spec, early, _most_alike(shm, call))
    is_quick = is_added_quickly(array_of(call.recv).dtype)
    most_ranks = _SCANNING_RANKS if is_quick else RANKS_ALONE
    return ScanInChunks(shm, call, spec) if call.size <= most_ranks else None


def _most_alike(shm: ShmGroup, call: Call) -> int:
    """Return up to how many bytes a reduction takes one step, whatever the trials of longer ones say; 0 for none."""
    most = min(REDUCE_ALONE_BYTES // call.size, shm.region.slots.slot_bytes, LEAST_IN_CHUNKS - 1)
    return most if shm.compiled else 0


def plan_list_reduction(shm: ShmGroup, call: Call) -> Plan | None:
    """Return the plan that reduces the arrays of a list without packing them; None if they are to be packed."""
    composition = call.collective.composition
    assert composition is not None
    if definition_of(composition.inner).dataflow is not ALL_REDUCE or not call.collective.in_place:
        return None
    arrays = each(call.recv)
    num_bytes = sum(array.nbytes for array in arrays)
    if num_bytes <= min(_LISTS_BYTES, shm.region.slots.slot_bytes):
        return ListReduce(shm, call, parts_of(arrays, num_bytes)[0])
    is_quick = call.size <= RANKS_ALONE and is_added_quickly(arrays[0].dtype)
    return ListReduceInChunks(shm, call) if is_quick and len(arrays) <= _MOST_IN_LIST else None


class SlotReduce(OneStep):
    """Few bytes: every rank that wants the result reduces all slots for itself, in rank order."""

    def __init__(
        self,
        shm: ShmGroup,
        call: Call,
        spec: ReductionSpec | ScanSpec,
        early: EarlyReturn | None = None,
        most_alike: int = 0,
    ) -> None:
        super().__init__(shm.barrier, shm.backend, call, early)
        assert call.op is not None
        slots = shm.region.slots if early is None else early.slots
        reserved = shm.reserve(spec.put_bytes, slots)
        self.set_alike(call, spec.put_bytes, most_alike, slots, reserved)
        self._puts = [spec.puts(slots, phase) for phase in self.phases]
        self._stacks = [spec.sources(slots, phase) for phase in self.phases]
        self._at_once = _is_reduced_at_once(self._stacks[0])
        # For each phase the rows of the stack; none if this rank wants no result.
        self._rows: list[list[Array]] = [
            [] if stack is None else [stack[row, ...] for row in range(len(stack))] for stack in self._stacks
        ]
        self._op, self._num_rows = call.op, len(self._rows[0])
        self._averages = call.op is ReduceOp.AVG
        # If the result takes the place of one of the inputs, the core reads that there, and puts it for other ranks
        # alone: 512 KiB took half of the time on 2 ranks. In a reduce_scatter it gained nothing.
        is_read_there = call.collective.in_place and self._num_rows > max(1, call.rank)
        self._own = (call.rank, 0, 0) if is_read_there else NO_ROW
        self._gives = spec.gives or not is_read_there
        self._combine = call.op.ufunc
        self._run = quiet_runner()

    def step_copies(self) -> StepCopies:
        nothing: list[Sequence[SlotCopy]] = [()] * self.num_listed
        puts = [*map(copies_of, self._puts[: self.num_listed])] if self._gives else nothing
        copies = StepCopies(self._puts, len(each(self._puts[0])), 0, puts, nothing)
        if not self._rows[0]:
            return copies
        row = self._rows[0][0]
        copies = copies._replace(keeps=(self._puts, self._rows), num_received=1)
        if self._num_rows == 1:
            return copies._replace(takes=[copies_of(rows) for rows in self._rows[: self.num_listed]])
        return copies._replace(
            op=self._op.value,
            kind=row.dtype.kind,
            itemsize=row.itemsize,
            num_rows=self._num_rows,
            rows=[[row.ctypes.data for row in rows] for rows in self._rows[: self.num_listed]],
            num_elements=row.size,
            own=self._own,
        )

    def put(self, send: Any, phase: int) -> None:
        put(send, self._puts[phase])

    def take(self, recv: Any, phase: int) -> None:
        rows = self._rows[phase]
        if not rows:
            return
        run, combine = self._run, self._combine
        if self._at_once:
            run(combine.reduce, self._stacks[phase], 0, None, recv)
        elif self._num_rows == 2:  # inlined: the shortest calls
            run(combine, rows[0], rows[1], out=recv)
        else:
            reduce_in_rank_order(run, self._op, rows, self._num_rows, recv)
            return
        if self._averages:
            run(ReduceOp.AVG.finish, recv, self._num_rows)


class Part(NamedTuple):
    """Elements of one of the arrays of a list."""

    which: int
    begin: int
    end: int


def parts_of(arrays: list[Array], chunk_bytes: int) -> list[list[Part]]:
    """Cut the arrays of a list, one after another, into chunks."""
    room = most = max(1, chunk_bytes // arrays[0].itemsize)
    chunks: list[list[Part]] = [[]]
    for which, array in enumerate(arrays):
        begin = 0
        while begin < array.size:
            if not room:
                chunks.append([])
                room = most
            end = min(array.size, begin + room)
            chunks[-1].append(Part(which, begin, end))
            begin, room = end, room - (end - begin)
    return chunks


class ListReduce(OneStep):
    """Few bytes in several arrays: every rank reduces all slots for itself, as if they were one array."""

    def __init__(self, shm: ShmGroup, call: Call, parts: list[Part]) -> None:
        super().__init__(shm.barrier, shm.backend, call)
        assert call.op is not None
        arrays: list[Array] = each(call.recv)
        dtype, ends = arrays[0].dtype, [*accumulate(part.end - part.begin for part in parts)]
        size = ends[-1] if ends else 0
        shm.reserve(size * dtype.itemsize)
        places = [slice(end - (part.end - part.begin), end) for part, end in zip(parts, ends, strict=True)]
        self._rows = [
            [shm.region.slots.slot(phase, peer, dtype, (size,)) for peer in range(call.size)] for phase in (0, 1)
        ]
        self._puts = [[rows[call.rank][place] for place in places] for rows in self._rows]
        self._total = np.empty(size, dtype)
        self._takes = [self._total[place] for place in places]
        self._op, self._size, self._parts, self._num_arrays = call.op, call.size, parts, len(arrays)
        self._rank = call.rank
        self._run = quiet_runner()

    def step_copies(self) -> StepCopies:
        takes = self._copies_of(self._takes)
        return StepCopies(
            keeps=(self._puts, self._rows, self._total),
            num_sent=self._num_arrays,
            num_received=self._num_arrays,
            puts=[*map(self._copies_of, self._puts)],
            takes=[takes, takes],
            op=self._op.value,
            kind=self._total.dtype.kind,
            itemsize=self._total.itemsize,
            num_rows=self._size,
            rows=[[row.ctypes.data for row in rows] for rows in self._rows],
            num_elements=self._total.size,
            totals=(self._total.ctypes.data, self._total.ctypes.data),
            own=(self._rank, -1, 0),
        )

    def put(self, send: Any, phase: int) -> None:
        for place, part in zip(self._puts[phase], self._cut(send), strict=True):
            place[...] = part

    def take(self, recv: Any, phase: int) -> None:
        reduce_in_rank_order(self._run, self._op, self._rows[phase], self._size, self._total)
        for place, part in zip(self._takes, self._cut(recv), strict=True):
            part[...] = place

    def _cut(self, arrays: list[Array]) -> list[Array]:
        return [flat(arrays[part.which])[part.begin : part.end] for part in self._parts]

    def _copies_of(self, places: list[Array]) -> list[SlotCopy]:
        return [
            SlotCopy(part.which, part.begin * place.itemsize, place.nbytes, place.ctypes.data)
            for part, place in zip(self._parts, places, strict=True)
        ]


class ListReduceInChunks(BarrierPlan):
    """More bytes in several arrays, for few ranks: chunk by chunk, each in a step."""

    def __init__(self, shm: ShmGroup, call: Call) -> None:
        super().__init__(shm.barrier, shm.backend, call)
        chunk_bytes = min(_LIST_CHUNK_BYTES, shm.region.slots.slot_bytes)
        self._chunks = [ListReduce(shm, call, parts) for parts in parts_of(each(call.recv), chunk_bytes)]

    def adopt_signature(self, signature: Signature) -> None:
        super().adopt_signature(signature)
        for chunk in self._chunks:
            chunk.adopt_signature(signature)

    def run(self, send: Buffers, recv: Buffers) -> None:
        for chunk in self._chunks:
            chunk.run(send, recv)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        for chunk in self._chunks:
            yield from chunk.steps(send, recv)


def _is_reduced_at_once(stack: Array | None) -> bool:
    if stack is None or len(stack) < _STACKED_RANKS or stack[0].nbytes > _STACKED_BYTES * len(stack):
        return False
        # NumPy adds a column of rows in rank order, but single numbers pairwise: their sum would depend on the number
        # of elements sent with them.
    return bool(stack[0].size > 1)


class SingleCopyReduce(SingleCopyPlan):
    """Many bytes: each rank reads its segment of the peers' arrays piece by piece, and adds it to its own.

    A piece stays in the cache between being read and being added. In an all_reduce each rank reduces its segment into
    the result, and then reads the finished segments of the others; or each finished piece is `written`, from the cache,
    into the results of the others. The result may be the input: only the rank that reduces a segment reads it.
    """

    def __init__(self, shm: ShmGroup, call: Call, spec: ReductionSpec, written: int = 0) -> None:
        super().__init__(shm, call, spec.give, spec.take, written)
        assert call.op is not None
        self._spec = spec
        self._op = call.op
        self._run = quiet_runner()

    def reduced(self) -> Reduced:
        dtype, (first, second) = self._spec.dtype, self.shm.scratch(np.dtype(np.uint8))
        scratch = first.ctypes.data, second.ctypes.data
        return Reduced(self._op.value, dtype.kind, dtype.itemsize, self._spec.keeps, scratch, first.nbytes)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        give, take = self._spec.give(send), self._spec.take(recv)
        phase = self.announce(give, take)
        tables = [self.shm.region.table(phase, peer) for peer in range(self.size)]
        self.expose(take)
        yield self.arrive()
        total = take[self.rank]
        assert total is not None
        places = [tuple(table[self.rank].tolist()) for table in tables]
        self._reduce(give[self.rank], total, places)
        yield self.arrive()
        self.shm.end_exposure()
        if not self._spec.keeps and not self.written:
            for peer in self.others():
                wanted = take[peer]
                if wanted is not None:
                    self.read(peer, int(tables[peer][peer, 3]), wanted)
            yield self.arrive()

    def _reduce(self, own: Array, total: Array, places: list[tuple[int, ...]]) -> None:
        """Reduce this rank's segment; `places` are the words of the table about it, of each rank."""
        # The first piece of scratch holds partial sums, the second what is read for them.
        first, second = self.shm.scratch(own.dtype)
        addresses = [place[0] for place in places]
        for begin in range(0, own.size, first.size):
            mine, part, offset = (
                own[begin : begin + first.size],
                total[begin : begin + first.size],
                begin * own.itemsize,
            )
            pieces = self._pieces(mine, addresses, offset, first[: part.size], second[: part.size])
            reduce_in_rank_order(self._run, self._op, pieces, self.size, part, scratch=first[: part.size])
            for peer in self.others() if self.written else ():
                _, _, wanted, target = places[peer]
                if wanted:
                    self.write(peer, target + offset, part)

    def _pieces(self, own: Array, addresses: list[int], offset: int, first: Array, second: Array) -> Iterator[Array]:
        for peer, address in enumerate(addresses):
            piece = own if peer == self.rank else first if peer == 0 else second
            if peer != self.rank:
                self.read(peer, address + offset, piece)
            yield piece
