"""all_reduce of more bytes with several ranks on some hosts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.hier.hierarchy import Hierarchy
from meshdist.backends.gloo.hier.reductions import SegmentReducer
from meshdist.collectives.algorithms.blocks import flat, shares_of
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_reduce import all_reduce
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.waiting import Waitable


class TwoLevelReduce(Plan):
    """Reduce within each host, then a share of the array along each rail, then gather within each host."""

    def __init__(self, hierarchy: Hierarchy, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        assert call.op is not None
        assert isinstance(call.recv, np.ndarray)
        self._hierarchy = hierarchy
        self._fingerprint = self.signature.fingerprint
        # Divide once, by the number of all ranks.
        op = ReduceOp.SUM if call.op is ReduceOp.AVG else call.op
        array = flat(call.recv)
        shares = self._shares(array)
        outer = self.signature
        self._reduce = hierarchy.plan_local(outer, all_reduce, call, send=array, recv=array, op=op)
        self._gather = hierarchy.plan_local(outer, all_gather, call, send=shares[hierarchy.place], recv=shares)
        self._segments: SegmentReducer | None = None
        if hierarchy.rail is not None:
            rail = hierarchy.rail
            longest = max(share.size for share in shares_of(shares[hierarchy.place], rail.size))
            self._segments = SegmentReducer(rail, call.op, call.size, array.dtype, longest, rail.others)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        hierarchy, array = self._hierarchy, flat(recv)
        shares = self._shares(array)
        own = shares[hierarchy.place]
        hierarchy.tracker.begin(self.signature, self._fingerprint)
        yield from hierarchy.run_local(self._reduce, array, array)
        if self._segments is not None:
            assert hierarchy.rail is not None
            hierarchy.rail.begin()
            segments = shares_of(own, hierarchy.rail.size)
            yield from hierarchy.guarded(self._segments.reduce(segments, segments))
        yield from hierarchy.run_local(self._gather, own, shares)

    def _shares(self, array: Array) -> list[Array]:
        """Return the share of each rank of this host: equal ones on rails, empty ones for the others."""
        hierarchy = self._hierarchy
        nothing = [array[:0]] * (len(hierarchy.mine) - hierarchy.num_rails)
        return [*shares_of(array, hierarchy.num_rails), *nothing]
