"""Reductions: all_reduce, reduce and reduce_scatter.

The data is cut into a segment for each rank, which that rank reduces; so all ranks work, every element is reduced by
one rank in a fixed order, and the result is the same to the last bit on all ranks and in every run. Few bytes are put
into the slots and reduced by every rank for itself, in rank order.
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
from meshdist.call import Buffers, Call
from meshdist.quiet import quiet_runner
from meshdist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from meshdist.backends.gloo.host import Host


# Up to here, over all ranks, every rank reduces for itself in one step. Measured on 2 and 4 ranks. More goes through
# the slots, at every size: to read the others' memory instead took a third longer on 2 ranks, and as long on 4.
REDUCE_ALONE_BYTES = 1 << 20


def plan_reduction(host: Host, call: Call, cut: Cut) -> Plan:
    """Return the plan that reduces `cut` fastest."""
    if cut.put_bytes <= min(REDUCE_ALONE_BYTES // call.size, host.arena.slot_bytes):
        host.reserve(cut.put_bytes)
        return SlotReduce(host, call, cut)
    host.reserve(host.arena.slot_bytes)
    return SharedReduce(host, call, cut, ChunkedReduce(host, call, cut))


class SlotReduce(OneStep):
    """Few bytes: every rank that wants the result reduces all slots for itself, in rank order."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host.lockstep, host.backend, call)
        assert call.op is not None
        self._puts = [cut.puts(host.arena, use) for use in (0, 1)]
        sources = [cut.sources(host.arena, use) for use in (0, 1)]
        self._sources = [None if found is None else (found[0], found[1], found[2:]) for found in sources]
        self._combine = call.op.ufunc
        self._run = quiet_runner()
        self._size = call.size if call.op is ReduceOp.AVG else 0

    def put(self, send: Any, use: int) -> None:
        put(send, self._puts[use])

    def take(self, recv: Any, use: int) -> None:
        sources = self._sources[use]
        if sources is None:
            return
        run, combine = self._run, self._combine
        first, second, rest = sources
        run(combine, first, second, out=recv)
        for source in rest:
            run(combine, recv, source, out=recv)
        if self._size:
            run(ReduceOp.AVG.finish, recv, self._size)


class ChunkedReduce(LockstepPlan):
    """More bytes, through the slots: chunk by chunk, each rank reduces its part of the chunk."""

    def __init__(self, host: Host, call: Call, cut: Cut) -> None:
        super().__init__(host.lockstep, host.backend, call)
        assert call.op is not None
        # Slot of rank i, area j: what rank i has for the segment of rank j; area i: the finished part of its own.
        self._chunk = host.arena.slot_bytes // call.size // cut.dtype.itemsize
        self._areas = host.areas(cut.dtype, self._chunk)
        self._cut = cut
        self._op = call.op
        self._run = quiet_runner()
        self._rank, self._size = call.rank, call.size

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        give, take = self._cut.give(send), self._cut.take(recv)
        rank, ranks, chunk = self._rank, range(self._size), self._chunk
        for begin in range(0, self._cut.longest, chunk):
            area = self._areas[self.lockstep.flip()]
            for peer in ranks:
                if peer != rank:
                    part = give[peer][begin : begin + chunk]
                    area[rank][peer][: part.size] = part
            yield self.arrive()
            own = give[rank][begin : begin + chunk]
            kept = take[rank]
            total = (
                kept[begin : begin + chunk] if self._cut.keeps and kept is not None else area[rank][rank][: own.size]
            )
            self._reduce([own if peer == rank else area[peer][rank][: own.size] for peer in ranks], total)
            if not self._cut.keeps:
                yield self.arrive()
                for peer in ranks:
                    wanted = take[peer]
                    if wanted is not None:
                        part = wanted[begin : begin + chunk]
                        part[...] = area[peer][peer][: part.size]

    def _reduce(self, sources: list[Array], total: Array) -> None:
        run, combine = self._run, self._op.ufunc
        run(combine, sources[0], sources[1], out=total)
        for source in sources[2:]:
            run(combine, total, source, out=total)
        run(self._op.finish, total, self._size)
