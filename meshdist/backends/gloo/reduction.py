"""Reductions: all_reduce, reduce and reduce_scatter.

The data is cut into a segment for each rank, which that rank reduces; so all ranks work. Few bytes are put into the
slots and reduced by every rank for itself; so are many, chunk by chunk, where there are only two ranks. Whoever does
it, every element is reduced in rank order: the result is the same to the last bit on all ranks and in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshdist.arrays import Array
from meshdist.backends.base import Plan
from meshdist.backends.gloo.cuts import Cut
from meshdist.backends.gloo.in_place import SharedReduce
from meshdist.backends.gloo.lockstep import Arrival, LockstepPlan, OneStep
from meshdist.backends.gloo.movement import put
from meshdist.backends.gloo.reading import ReadingPlan
from meshdist.backends.gloo.routes import Blocks
from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import flat
from meshdist.quiet import quiet_runner
from meshdist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from meshdist.backends.gloo.host import Host


# Up to here, over all ranks, every rank reduces for itself in one step. Measured on 2 and 4 ranks. More goes through
# the slots: to read the others' memory instead took a third longer on 2 ranks, and a quarter on 4.
REDUCE_ALONE_BYTES = 1 << 20
# Where that many ranks have so many bytes, they read each other's memory all the same: they meet three times, not once
# for each chunk, and to meet takes long where there are more ranks than free cores. 16 ranks on 2 cores took as long as
# through the slots where nothing else ran, and a quarter of that where much did.
_READING_RANKS, SINGLE_COPY_REDUCE_BYTES = 8, 2 << 20
# For that many ranks, and up to so many bytes for each of them, one call of NumPy for all slots takes less time than a
# call for each.
_STACKED_RANKS, _STACKED_BYTES = 4, 1024
# Up to so many ranks reduce all of a chunk each for itself: two add twice as much as if they shared the work, but meet
# once for a chunk and move each element once, which took a quarter to a third less time. (3 ranks on 2 cores took a
# sixth less as well; with a core for each they would not.)
_RANKS_ALONE = 2
# Not so numbers that the processor adds one by one, when to share the work is what counts: half and long double
# precision, and those that are not NumPy's own.
_QUICK_KINDS, _SLOW_CODES = "biufc", "egG"
# So many ranks wait for each other longer than it takes to fetch more from memory: 4 ranks on 2 cores took a fifth less
# time, 16 half of it, but 2 ranks a tenth more.
_OVERLAPPING_RANKS = 4


def plan_reduction(host: Host, call: Call, cut: Cut) -> Plan:
    """Return the plan that reduces `cut` fastest."""
    if cut.put_bytes <= min(REDUCE_ALONE_BYTES // call.size, host.arena.slot_bytes):
        host.reserve(cut.put_bytes)
        return SlotReduce(host, call, cut)
    if host.single_copy and cut.in_place and call.size >= _READING_RANKS and cut.put_bytes >= SINGLE_COPY_REDUCE_BYTES:
        return SharedReduce(host, call, cut, SingleCopyReduce(host, call, cut))
    host.reserve(host.arena.slot_bytes)
    way = WholeChunkReduce if _is_reduced_whole(call, cut) else ChunkedReduce
    return SharedReduce(host, call, cut, way(host, call, cut))


class SlotReduce(OneStep):
    """Few bytes: every rank that wants the result reduces all slots for itself, in rank order."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host.lockstep, host.backend, call)
        assert call.op is not None
        self._puts = [cut.puts(host.arena, use) for use in (0, 1)]
        self._stacks = [cut.sources(host.arena, use) for use in (0, 1)]
        self._at_once = _is_reduced_at_once(self._stacks[0])
        # Of each use the rows of the stack; none where this rank wants no result.
        self._rows: list[list[Array]] = [
            [] if stack is None else [stack[peer, ...] for peer in range(call.size)] for stack in self._stacks
        ]
        self._combine = call.op.ufunc
        self._run = quiet_runner()
        self._size = call.size if call.op is ReduceOp.AVG else 0

    def put(self, send: Any, use: int) -> None:
        put(send, self._puts[use])

    def take(self, recv: Any, use: int) -> None:
        rows = self._rows[use]
        if not rows:
            return
        run, combine = self._run, self._combine
        if self._at_once:
            run(combine.reduce, self._stacks[use], 0, None, recv)
        else:
            run(combine, rows[0], rows[1], out=recv)
            for row in rows[2:]:
                run(combine, recv, row, out=recv)
        if self._size:
            run(ReduceOp.AVG.finish, recv, self._size)


def _is_reduced_at_once(stack: Array | None) -> bool:
    if stack is None or len(stack) < _STACKED_RANKS or stack[0].nbytes > _STACKED_BYTES * len(stack):
        return False
    # NumPy adds a column of rows in rank order, as all reductions do, but one number for each rank in pairs: the sum
    # would depend on what else is sent with it.
    return bool(stack[0].size > 1)


def _is_reduced_whole(call: Call, cut: Cut) -> bool:
    if cut.keeps or call.size > _RANKS_ALONE:
        return False
    return cut.dtype.kind in _QUICK_KINDS and cut.dtype.char not in _SLOW_CODES


class ReduceByChunk(LockstepPlan):
    """What reducing chunk by chunk through the slots has in common."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host.lockstep, host.backend, call)
        assert call.op is not None
        self._cut = cut
        self._op = call.op
        self._run = quiet_runner()
        self._rank, self._size = call.rank, call.size

    def _combine(self, sources: list[Array], total: Array) -> None:
        """Put the reduction of what each rank has, in rank order, into `total`."""
        run, combine = self._run, self._op.ufunc
        first, second, *rest = sources
        run(combine, first, second, out=total)
        for source in rest:
            run(combine, total, source, out=total)
        run(self._op.finish, total, self._size)


class WholeChunkReduce(ReduceByChunk):
    """More bytes, of few ranks: as SlotReduce, but chunk by chunk."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host, call, cut)
        self._chunk = host.arena.slot_bytes // cut.dtype.itemsize
        self._slots = [
            [host.arena.slot(use, peer, cut.dtype, (self._chunk,)) for peer in range(call.size)] for use in (0, 1)
        ]
        self._wants = call.root in (None, call.rank)
        self._gives = call.root != call.rank

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        given, taken = flat(send), flat(recv)
        for begin in range(0, given.size, self._chunk):
            own = given[begin : begin + self._chunk]
            slots = [slot[: own.size] for slot in self._slots[self.lockstep.flip()]]
            if self._gives:
                slots[self._rank][...] = own
            yield self.arrive()
            if self._wants:
                slots[self._rank] = own
                self._combine(slots, taken[begin : begin + self._chunk])


class ChunkedReduce(ReduceByChunk):
    """More bytes, through the slots: chunk by chunk, each rank reduces its part of the chunk."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host, call, cut)
        # Slot of rank i, area j: what rank i has for the segment of rank j; area i: the finished part of its own.
        chunk = host.arena.slot_bytes // call.size // cut.dtype.itemsize
        self._areas = host.areas(cut.dtype, chunk)
        self._chunks = [slice(begin, begin + chunk) for begin in range(0, cut.longest, chunk)]

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        way = self._overlapping if self._size >= _OVERLAPPING_RANKS else self._in_turn
        return way(self._cut.give(send), self._cut.take(recv))

    def _in_turn(self, give: list[Array], take: Blocks) -> Iterator[Arrival]:
        for chunk in self._chunks:
            area = self._areas[self.lockstep.flip()]
            self._put(area, give, chunk)
            yield self.arrive()
            self._reduce(area, give, take, chunk)
            if not self._cut.keeps:
                yield self.arrive()
                self._take(area, take, chunk)

    def _overlapping(self, give: list[Array], take: Blocks) -> Iterator[Arrival]:
        # While one chunk is reduced the next is put into the other slot, and the last is taken out, which all have
        # finished: so the ranks meet once for a chunk.
        chunks, areas = self._chunks, [self._areas[self.lockstep.use ^ 1], self._areas[self.lockstep.use]]
        for number in range(len(chunks) + (1 if self._cut.keeps else 2)):
            if number:
                yield self.arrive()
            if number < len(chunks):
                self.lockstep.flip()
                self._put(areas[number & 1], give, chunks[number])
            if 1 <= number <= len(chunks):
                self._reduce(areas[number - 1 & 1], give, take, chunks[number - 1])
            if number >= 2 and not self._cut.keeps:
                self._take(areas[number & 1], take, chunks[number - 2])

    def _put(self, area: list[list[Array]], give: list[Array], chunk: slice) -> None:
        for peer, mine in enumerate(area[self._rank]):
            if peer != self._rank:
                part = give[peer][chunk]
                mine[: part.size] = part

    def _reduce(self, area: list[list[Array]], give: list[Array], take: Blocks, chunk: slice) -> None:
        rank = self._rank
        own, kept = give[rank][chunk], take[rank]
        total = kept[chunk] if self._cut.keeps and kept is not None else area[rank][rank][: own.size]
        self._combine([own if peer == rank else slot[rank][: own.size] for peer, slot in enumerate(area)], total)

    def _take(self, area: list[list[Array]], take: Blocks, chunk: slice) -> None:
        for peer, wanted in enumerate(take):
            if wanted is not None:
                part = wanted[chunk]
                part[...] = area[peer][peer][: part.size]


class SingleCopyReduce(ReadingPlan):
    """Many bytes: each rank reads its segment of the others' arrays piece by piece, and adds it to its own.

    A piece stays in the cache between being read and being added. In an all_reduce the segments are reduced in place
    (nobody else reads this rank's own), and then each rank reads the finished ones.
    """

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host, call)
        assert call.op is not None
        self._cut = cut
        self._op = call.op
        self._run = quiet_runner()

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        give, take = self._cut.give(send), self._cut.take(recv)
        use = self.announce(give, take)
        tables = [self.host.arena.table(use, peer) for peer in range(self.size)]
        yield self.arrive()
        total = take[self.rank]
        assert total is not None
        self._reduce(give[self.rank], total, [int(table[self.rank, 0]) for table in tables])
        yield self.arrive()
        if not self._cut.keeps:
            for peer in self.others():
                wanted = take[peer]
                if wanted is not None:
                    self.read(peer, int(tables[peer][peer, 0]), wanted)
            yield self.arrive()

    def _reduce(self, own: Array, total: Array, addresses: list[int]) -> None:
        run, combine = self._run, self._op.ufunc
        # In rank order, as everywhere: the result does not depend on the way. What comes before this rank's own is
        # summed in the first piece of scratch, and the other pieces are read into the second.
        first, second = self.host.scratch(own.dtype)
        for begin in range(0, own.size, first.size):
            mine, part = own[begin : begin + first.size], total[begin : begin + first.size]
            so_far: Array | None = None
            for peer, address in enumerate(addresses):
                piece = mine
                if peer != self.rank:
                    piece = (first if so_far is None else second)[: part.size]
                    self.read(peer, address + begin * own.itemsize, piece)
                room = part if peer >= self.rank else first[: part.size]
                so_far = piece if so_far is None else run(combine, so_far, piece, out=room)
            run(self._op.finish, part, self.size)
