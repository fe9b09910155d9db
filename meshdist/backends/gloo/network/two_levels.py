"""all_reduce of more bytes in a group with several ranks on some hosts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.network.levels import Levels
from meshdist.backends.gloo.network.reductions import Segments
from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import flat, shares_of
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_reduce import all_reduce
from meshdist.reduce_op import ReduceOp
from meshdist.waiting import Waitable


class TwoLevelReduce(Plan):
    """Within each host, then between the hosts along each rail, a share of the array on each, then within each host.

    So each byte of the result crosses from host to host as seldom as with one rank on each, and all rails share that.
    """

    def __init__(self, levels: Levels, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        assert call.op is not None
        assert isinstance(call.recv, np.ndarray)
        self._levels = levels
        self._fingerprint = self.signature.fingerprint
        # The mean is taken once, of all.
        op = ReduceOp.SUM if call.op is ReduceOp.AVG else call.op
        array = flat(call.recv)
        shares = self._shares(array)
        outer = self.signature
        self._reduce = levels.plan_here(outer, all_reduce, call, send=array, recv=array, op=op)
        self._gather = levels.plan_here(outer, all_gather, call, send=shares[levels.place], recv=shares)
        self._segments: Segments | None = None
        if levels.rail is not None:
            rail = levels.rail
            longest = max(share.size for share in shares_of(shares[levels.place], rail.size))
            self._segments = Segments(rail, call.op, call.size, array.dtype, longest, rail.others)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        levels, array = self._levels, flat(recv)
        shares = self._shares(array)
        own = shares[levels.place]
        levels.agreement.begin(self.signature, self._fingerprint)
        yield from levels.run_here(self._reduce, array, array)
        if self._segments is not None:
            assert levels.rail is not None
            levels.rail.begin()
            segments = shares_of(own, levels.rail.size)
            yield from levels.crossing(self._segments.reduce(segments, segments))
        yield from levels.run_here(self._gather, own, shares)

    def _shares(self, array: Array) -> list[Array]:
        """Return the share of each rank of this host: of those on a rail, as large as those of its other ranks."""
        levels = self._levels
        nothing = [array[:0]] * (len(levels.mine) - levels.num_rails)
        return [*shares_of(array, levels.num_rails), *nothing]
