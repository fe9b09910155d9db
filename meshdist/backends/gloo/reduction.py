"""Reductions: all_reduce, reduce and reduce_scatter.

The data is cut into a segment for each rank, which that rank reduces; so all ranks work. Few bytes are put into the
slots and reduced by every rank for itself, more chunk by chunk; where there are many ranks they read each other's
memory. Whoever does it, every element is reduced in rank order: the result is the same to the last bit on all ranks and
in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshdist.arrays import Array
from meshdist.backends.base import Plan
from meshdist.backends.gloo.chunked_reduction import chunked_reduction
from meshdist.backends.gloo.copying import CopyingPlan
from meshdist.backends.gloo.cuts import Cut
from meshdist.backends.gloo.in_place import SharedReduce
from meshdist.backends.gloo.lockstep import Arrival, OneStep
from meshdist.backends.gloo.movement import put
from meshdist.call import Buffers, Call
from meshdist.quiet import quiet_runner
from meshdist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from meshdist.backends.gloo.host import Host


# Up to here, over all ranks, every rank reduces for itself in one step. Measured on 2 and 4 ranks. More goes through
# the slots: to read the others' memory instead took a third longer on 2 ranks, and a quarter on 4.
REDUCE_ALONE_BYTES = 1 << 20
# Where that many ranks have so many bytes, they read each other's memory all the same: they meet three times, not twice
# for each chunk, and to meet takes long where there are more ranks than free cores. 16 ranks on 2 cores took three
# quarters to nine tenths of the time through the slots, 8 ranks a fifth more than that.
_READING_RANKS, SINGLE_COPY_REDUCE_BYTES = 16, 8 << 20
# For that many ranks, and up to so many bytes for each of them, one call of NumPy for all slots takes less time than a
# call for each.
_STACKED_RANKS, _STACKED_BYTES = 4, 1024


def plan_reduction(host: Host, call: Call, cut: Cut) -> Plan:
    """Return the plan that reduces `cut` fastest."""
    if cut.put_bytes <= min(REDUCE_ALONE_BYTES // call.size, host.arena.slot_bytes):
        host.reserve(cut.put_bytes)
        return SlotReduce(host, call, cut)
    if host.single_copy and cut.in_place and call.size >= _READING_RANKS and cut.put_bytes >= SINGLE_COPY_REDUCE_BYTES:
        return SharedReduce(host, call, cut, SingleCopyReduce(host, call, cut))
    return SharedReduce(host, call, cut, chunked_reduction(host, call, cut))


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


class SingleCopyReduce(CopyingPlan):
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
