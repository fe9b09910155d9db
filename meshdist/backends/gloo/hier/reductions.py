"""Reductions between hosts: all_reduce, reduce and reduce_scatter.

Few bytes are sent to all ranks, each of which reduces them in rank order. More are cut into a segment for each rank,
which reduces it in a fixed order. So the result is the same to the last bit on all ranks and in every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import ReduceOp, quiet_runner
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.hier.call_tracker import CallTracker
from meshdist.backends.gloo.hier.hierarchy import Hierarchy
from meshdist.backends.gloo.hier.rail import Rail, RailPlan, bytes_of
from meshdist.backends.gloo.tcp.collective_frames import ExpectedFrame
from meshdist.collectives.algorithms.blocks import flat, reduce_in_rank_order, shares_of
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.dataflow import Blocks, ReductionSpec
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.waiting import Waitable

# Size of the chunks that are received and added: they stay in the cache in between.
CHUNK_BYTES = 256 << 10
# Chunks of each peer that may arrive while one is added.
_AHEAD = 8


class WholeReduce(RailPlan):
    """Few bytes: all send all they have to all, and the ranks that want the result reduce it in rank order."""

    def __init__(self, rail: Rail, tracker: CallTracker, backend: Backend, call: Call, wanted: bool) -> None:
        super().__init__(rail, tracker, backend, call)
        assert call.op is not None
        assert isinstance(call.recv, np.ndarray)
        room = rail.scratch.take(rail.size * call.recv.nbytes)
        self._rows = room.view(call.recv.dtype).reshape(rail.size, call.recv.size)
        self._places = [bytes_of(row) for row in self._rows]
        self._own = self._rows[rail.place]
        self._op, self._size = call.op, call.size
        self._wanted = wanted
        self._run = quiet_runner()

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        rail, places = self.begin(), self._places
        self._own[...] = flat(send)
        slots = [rail.expect(peer, places[peer]) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, places[rail.place])
        yield rail.frames_wait(slots)
        yield from rail.flush()
        if self._wanted:
            reduce_in_rank_order(self._run, self._op, self._rows, self._size, flat(recv))


class SegmentReduce(RailPlan):
    """More bytes: each rank reduces its segment, and sends it to the ranks that want it."""

    def __init__(self, rail: Rail, tracker: CallTracker, backend: Backend, call: Call, spec: ReductionSpec) -> None:
        super().__init__(rail, tracker, backend, call)
        assert call.op is not None
        takers = [] if spec.keeps else [peer for peer in rail.others if spec.taker in (None, peer)]
        self._spec = spec
        self._segments = SegmentReducer(rail, call.op, call.size, spec.dtype, spec.longest, takers)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        give, take = self._spec.give(send), self._spec.take(recv)
        self.begin()
        yield from self._segments.reduce(give, take)


class SegmentReducer:
    """Data in segments, one for each rank of a rail, which reduces it chunk by chunk as the chunks arrive.

    A finished chunk is sent at once to the `takers`, the places that want it, while the next is added. `longest` is the
    number of elements of the longest segment; `num_ranks` counts the ranks whose data the result contains, for the
    mean.
    """

    def __init__(
        self, rail: Rail, op: ReduceOp, num_ranks: int, dtype: np.dtype[Any], longest: int, takers: list[int]
    ) -> None:
        self._rail = rail
        self._op = op
        self._num_ranks = num_ranks
        self._longest = longest
        self._takers = takers
        self._chunk = max(1, CHUNK_BYTES // dtype.itemsize)
        self._dtype = dtype
        self._run = quiet_runner()

    def reduce(self, give: Sequence[Array], take: Blocks) -> Iterator[Waitable]:
        """Reduce `give`, this rank's data for each segment, into `take`, where None marks a segment not wanted here."""
        rail = self._rail
        own, kept = give[rail.place], take[rail.place]
        total = np.empty_like(own) if kept is None else kept
        for begin in self._begins(self._longest):
            for peer in rail.others:
                self._send(peer, give[peer], begin)
        begins = self._begins(own.size)
        room = self._room(own, len(begins))

        def expect(number: int) -> tuple[list[ExpectedFrame], list[Array]]:
            return self._expect(room[number % _AHEAD], min(self._chunk, own.size - begins[number]))

        ahead = deque(map(expect, range(min(len(begins), _AHEAD))))
        finished: list[ExpectedFrame] = []
        for number, begin in enumerate(begins):
            if number + _AHEAD >= len(begins) and not finished:
                # A peer's finished chunks follow its data for this segment, all of which is expected by now.
                finished = self._expect_finished(take)
            slots, parts = ahead.popleft()
            yield rail.frames_wait(slots)
            piece = total[begin : begin + self._chunk]
            mine = own[begin : begin + self._chunk]
            reduce_in_rank_order(self._run, self._op, [mine, *parts], len(parts) + 1, piece, self._num_ranks)
            for peer in self._takers:
                rail.send(peer, bytes_of(piece))
            if number + _AHEAD < len(begins):
                ahead.append(expect(number + _AHEAD))
        yield rail.frames_wait(finished)
        yield from rail.flush()

    def _begins(self, size: int) -> range:
        # A rank without elements sends one empty frame: all ranks hear from all.
        return range(0, max(size, 1), self._chunk)

    def _send(self, peer: int, block: Array, begin: int) -> None:
        if begin == 0 or begin < block.size:
            self._rail.send(peer, bytes_of(block[begin : begin + self._chunk]))

    def _room(self, own: Array, num_chunks: int) -> Array:
        """Return where chunks arrive: a row for each that is expected at once, with a chunk of each peer."""
        rows, columns, size = min(num_chunks, _AHEAD), len(self._rail.others), min(self._chunk, own.size)
        room = self._rail.scratch.take(rows * columns * size * own.itemsize)
        return room.view(self._dtype).reshape(rows, columns, size)

    def _expect(self, row: Array, size: int) -> tuple[list[ExpectedFrame], list[Array]]:
        rail, parts = self._rail, [part[:size] for part in row]
        return [rail.expect(peer, bytes_of(part)) for peer, part in zip(rail.others, parts, strict=True)], parts

    def _expect_finished(self, take: Blocks) -> list[ExpectedFrame]:
        rail = self._rail
        wanted = [(peer, block) for peer in rail.others if (block := take[peer]) is not None]
        return [
            rail.expect(peer, bytes_of(block[begin : begin + self._chunk]))
            for peer, block in wanted
            for begin in self._begins(block.size)
        ]


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
