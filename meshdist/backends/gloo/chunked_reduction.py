"""Reductions of more bytes than a slot holds: through the slots, chunk by chunk.

The plans differ in who reduces a chunk, and so in how often the ranks meet for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshdist.arrays import Array
from meshdist.backends.gloo.cuts import Cut
from meshdist.backends.gloo.lockstep import Arrival, LockstepPlan
from meshdist.backends.gloo.routes import array_of
from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import flat
from meshdist.quiet import quiet_runner

if TYPE_CHECKING:
    from meshdist.backends.gloo.host import Host

# Up to so many ranks reduce all of a chunk each for itself: two add twice as much as if they shared the work, but meet
# once for a chunk and move each element once, which took a quarter to a third less time. (3 ranks on 2 cores took a
# sixth less as well; with a core for each they would not.)
_RANKS_ALONE = 2
# What they move at a time: it is still in the second-level cache when it is added. Twice as much took a tenth less time
# up to 4 MiB, and a tenth to a fifth more from 16 MiB on.
_WHOLE_CHUNK_BYTES = 256 << 10
# Not so numbers that the processor adds one by one, when to share the work is what counts: half and long double
# precision, and those that are not NumPy's own.
_QUICK_KINDS, _SLOW_CODES = "biufc", "egG"


def chunked_reduction(host: Host, call: Call, cut: Cut) -> ReduceByChunk:
    """Return the plan that reduces `cut` fastest chunk by chunk."""
    if cut.keeps:
        return ReduceOwnSegments(host, call, cut)
    if call.size <= _RANKS_ALONE and cut.dtype.kind in _QUICK_KINDS and cut.dtype.char not in _SLOW_CODES:
        return ReduceWholeChunks(host, call, cut)
    return ReduceInSegments(host, call, cut)


class ReduceByChunk(LockstepPlan):
    """What reducing chunk by chunk through the slots has in common."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host.lockstep, host.backend, call)
        assert call.op is not None
        self._cut = cut
        self._op = call.op
        self._run = quiet_runner()
        self._rank, self._size = call.rank, call.size
        self._wants = call.root in (None, call.rank)

    def _combine(self, sources: list[Array], total: Array) -> None:
        """Put the reduction of what each rank has, in rank order, into `total`."""
        run, combine = self._run, self._op.ufunc
        first, second, *rest = sources
        run(combine, first, second, out=total)
        for source in rest:
            run(combine, total, source, out=total)
        run(self._op.finish, total, self._size)


class ReduceWholeChunks(ReduceByChunk):
    """Of few ranks: every rank that wants the result reduces all of a chunk for itself."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host, call, cut)
        chunk_bytes = min(_WHOLE_CHUNK_BYTES, host.arena.slot_bytes)
        host.reserve(min(cut.put_bytes, chunk_bytes))
        self._chunk = chunk_bytes // cut.dtype.itemsize
        self._slots = [
            [host.arena.slot(use, peer, cut.dtype, (self._chunk,)) for peer in range(call.size)] for use in (0, 1)
        ]
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


class ReduceInSegments(ReduceByChunk):
    """Of more ranks: each rank reduces its segment of a chunk, and leaves it in its slot for all that want it.

    A chunk lies in the slots as it does in the arrays, so that few copies put it there and take the finished segments
    out: on 4 ranks, and with larger slots, it took two thirds of the time of a copy for each segment.
    """

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host, call, cut)
        host.reserve(min(cut.put_bytes, host.arena.slot_bytes))
        self._chunk = host.arena.slot_bytes // cut.dtype.itemsize // call.size * call.size
        whole, rest = divmod(array_of(call.recv).size, self._chunk)
        counts = [self._chunk] * whole + [rest] * (rest > 0)
        in_slots = {count: [_InSlots(host, call, cut, use, count) for use in (0, 1)] for count in set(counts)}
        self._chunks = [in_slots[count] for count in counts]

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        given, taken, begin = flat(send), flat(recv), 0
        for in_slots in self._chunks:
            slots, piece = in_slots[self.lockstep.flip()], slice(begin, begin + self._chunk)
            own = slots.put(given[piece])
            yield self.arrive()
            self._combine([*slots.before, own, *slots.behind], slots.total)
            yield self.arrive()
            if self._wants:
                slots.take(taken[piece])
            begin += self._chunk


class _InSlots:
    """Where a chunk lies in the slots.

    Attributes:
        before, behind: This rank's segment of it in the slots of the ranks before and behind this one.
        total: The same in its own slot, where the reduction of it goes.
    """

    def __init__(self, host: Host, call: Call, cut: Cut, use: int, count: int) -> None:
        length, slot, dtype = -(-count // call.size), host.arena.slot, cut.dtype
        begin, end = (min(rank * length, count) for rank in (call.rank, call.rank + 1))
        segments = [slot(use, rank, dtype, (end - begin,), begin * dtype.itemsize) for rank in range(call.size)]
        self.before, self.total, self.behind = segments[: call.rank], segments[call.rank], segments[call.rank + 1 :]
        self._own = slice(begin, end)
        mine = slot(use, call.rank, dtype, (count,))
        self._others = [(part, mine[part]) for part in (slice(0, begin), slice(end, count)) if part.start < part.stop]
        full, rest = divmod(count, length)
        # Each finished one in the slot of who reduced it; the last that has any may have fewer elements.
        self._finished = host.arena.diagonal(use, dtype, length)[:full]
        self._full = full * length
        self._last = slot(use, full, dtype, (rest,), self._full * dtype.itemsize) if rest else None

    def put(self, chunk: Array) -> Array:
        """Put the segments of the other ranks into the slot; return this rank's own, which need not be there."""
        for part, place in self._others:
            place[...] = chunk[part]
        return chunk[self._own]

    def take(self, chunk: Array) -> None:
        """Take the finished segments."""
        chunk[: self._full].reshape(self._finished.shape)[...] = self._finished
        if self._last is not None:
            chunk[self._full :] = self._last


class ReduceOwnSegments(ReduceByChunk):
    """For a reduce_scatter: each rank reduces, and keeps, its segment of a chunk."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host, call, cut)
        host.reserve(host.arena.slot_bytes)
        # Slot of rank i, area j: what rank i has for the segment of rank j.
        chunk = host.arena.slot_bytes // call.size // cut.dtype.itemsize
        self._areas = host.areas(cut.dtype, chunk)
        self._chunks = [slice(begin, begin + chunk) for begin in range(0, cut.longest, chunk)]

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        rank, give, kept = self._rank, self._cut.give(send), flat(recv)
        for chunk in self._chunks:
            areas = self._areas[self.lockstep.flip()]
            for peer, place in enumerate(areas[rank]):
                if peer != rank:
                    part = give[peer][chunk]
                    place[: part.size] = part
            yield self.arrive()
            own = give[rank][chunk]
            sources = [own if peer == rank else slot[rank][: own.size] for peer, slot in enumerate(areas)]
            self._combine(sources, kept[chunk])
