"""Collectives of few bytes with several ranks on some hosts: all ranks learn what every rank gives.

The ranks of a host gather their data in shared memory, the first rank of each host exchanges it with the others', and
broadcasts the result on its host. Each rank then takes or reduces what it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from meshdist.arrays.host import Array, as_bytes
from meshdist.arrays.reduce_op import quiet_runner
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.hier.hierarchy import Hierarchy
from meshdist.backends.gloo.hier.rail import bytes_of
from meshdist.collectives.algorithms.blocks import flat, reduce_in_rank_order
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.barrier import barrier
from meshdist.collectives.broadcast import broadcast
from meshdist.collectives.dataflow import ReductionSpec, TransferSpec
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.waiting import Waitable

# Limit of the total over all ranks.
MOST_BYTES = 64 << 10

# (what is sent, this rank's row as bytes): fills the row.
Putter = Callable[[Any, Array], None]
# (the rows of all ranks as bytes, output): fills the output.
Taker = Callable[[list[Array], Any], None]


class SmallAllgather(Plan):
    """All ranks learn what every rank gives: `sizes` bytes each, written by `put` and read by `take`."""

    copies = True

    def __init__(
        self,
        hierarchy: Hierarchy,
        backend: Backend,
        call: Call,
        sizes: list[int],
        take: Taker,
        put: Putter | None = None,
    ) -> None:
        super().__init__(backend, call)
        self._hierarchy = hierarchy
        self._fingerprint = self.signature.fingerprint
        self._put, self._take = put or put_side_by_side, take
        # The rows of a host are contiguous.
        order = [rank for ranks in hierarchy.hosts for rank in ranks]
        ends = list(accumulate(sizes[rank] for rank in order))
        self._table = hierarchy.scratch.take(ends[-1])
        rows = {rank: self._table[end - sizes[rank] : end] for rank, end in zip(order, ends, strict=True)}
        self._rows = [rows[rank] for rank in range(call.size)]
        self._own = rows[call.rank]
        self._here = [rows[rank] for rank in hierarchy.mine]
        begins, host_ends = {}, {}
        for rank, end in zip(order, ends, strict=True):
            begins[rank], host_ends[rank] = end - sizes[rank], end
        self._hosts = [bytes_of(self._table[begins[ranks[0]] : host_ends[ranks[-1]]]) for ranks in hierarchy.hosts]
        plan, outer = hierarchy.plan_local, self.signature
        if ends[-1]:
            self._gather = plan(outer, all_gather, call, send=self._own, recv=self._here)
            self._spread = plan(outer, broadcast, call, send=self._table, recv=self._table, root=0)
        else:
            self._gather = self._spread = plan(outer, barrier, call, send=None, recv=None)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        hierarchy = self._hierarchy
        hierarchy.tracker.begin(self.signature, self._fingerprint)
        if self._own.size:
            self._put(send, self._own)
        yield from hierarchy.run_local(self._gather, self._own, self._here)
        if hierarchy.place == 0:
            yield from hierarchy.guarded(self._exchange())
        yield from hierarchy.run_local(self._spread, self._table, self._table)
        self._take(self._rows, recv)

    def _exchange(self) -> Iterator[Waitable]:
        rail, hosts = self._hierarchy.rail, self._hosts
        assert rail is not None
        rail.begin()
        slots = [rail.expect(peer, hosts[peer]) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, hosts[rail.place])
        yield rail.frames_wait(slots)
        yield from rail.flush()


def plan_small_allgather(
    hierarchy: Hierarchy, backend: Backend, call: Call, spec: TransferSpec | ReductionSpec | None
) -> Plan | None:
    if isinstance(spec, ReductionSpec):
        sizes, take = [spec.put_bytes] * call.size, _reduced(call, spec)
    elif spec is not None and spec.given_bytes is not None:
        sizes, take = list(spec.given_bytes), _moved(call, spec)
    elif call.collective.native == "barrier":
        sizes, take = [0] * call.size, lambda rows, recv: None
    else:
        return None
    return SmallAllgather(hierarchy, backend, call, sizes, take) if sum(sizes) <= MOST_BYTES else None


def put_side_by_side(send: Buffers, row: Array) -> None:
    end = 0
    for array in send if isinstance(send, list) else [send]:
        assert array is not None
        row[end : end + array.nbytes] = as_bytes(array)
        end += array.nbytes


def _reduced(call: Call, spec: ReductionSpec) -> Taker:
    assert call.op is not None
    op, size, run, begin = call.op, call.size, quiet_runner(), spec.begin
    is_wanted = spec.taker in (None, call.rank)

    def take(rows: list[Array], recv: Any) -> None:
        if is_wanted:
            total = flat(recv)
            parts = [row[begin : begin + total.nbytes].view(total.dtype) for row in rows]
            reduce_in_rank_order(run, op, parts, size, total)

    return take


def _moved(call: Call, spec: TransferSpec) -> Taker:
    rank = call.rank

    def take(rows: list[Array], recv: Any) -> None:
        for block, row in zip(spec.take(recv), rows, strict=True):
            if block is not None:
                begin = 0 if spec.shared else rank * block.nbytes
                as_bytes(block)[...] = row[begin : begin + block.nbytes]

    return take
