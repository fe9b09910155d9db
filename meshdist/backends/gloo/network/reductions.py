"""Reductions between hosts: all_reduce, reduce and reduce_scatter.

As within a host, the data is cut into a segment for each rank, which reduces it in a fixed order; few bytes are sent
whole to all, and every rank reduces them for itself, in rank order. So the result is the same to the last bit on all
ranks and in every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.backends.base import Backend
from meshdist.backends.gloo.cuts import Cut
from meshdist.backends.gloo.network.agreement import Agreement
from meshdist.backends.gloo.network.rail import Rail, RailPlan, bytes_of
from meshdist.backends.gloo.routes import Blocks
from meshdist.backends.gloo.wire.parts import Slot
from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import flat
from meshdist.quiet import quiet_runner
from meshdist.reduce_op import ReduceOp
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.arrays import Array

# What is received, and then added, at a time: stays in the cache in between.
CHUNK_BYTES = 256 << 10
# Chunks of each peer that may come while one is added.
_AHEAD = 8


class WholeReduce(RailPlan):
    """Few bytes: all send all they have to all, and who wants the result reduces it in rank order."""

    def __init__(self, rail: Rail, agreement: Agreement, backend: Backend, call: Call, wanted: bool) -> None:
        super().__init__(rail, agreement, backend, call)
        assert call.op is not None
        assert isinstance(call.recv, np.ndarray)
        self._rows = np.empty((rail.size, call.recv.size), call.recv.dtype)
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
        yield rail.coming(slots)
        yield from rail.flush()
        if self._wanted:
            self._reduce(flat(recv))

    def _reduce(self, total: Array) -> None:
        run, combine, rows = self._run, self._op.ufunc, self._rows
        run(combine, rows[0], rows[1], out=total)
        for row in rows[2:]:
            run(combine, total, row, out=total)
        run(self._op.finish, total, self._size)


class SegmentReduce(RailPlan):
    """More bytes: each rank reduces its segment, and sends it to those who want it."""

    def __init__(self, rail: Rail, agreement: Agreement, backend: Backend, call: Call, cut: Cut) -> None:
        super().__init__(rail, agreement, backend, call)
        assert call.op is not None
        takers = [] if cut.keeps else [peer for peer in rail.others if call.root in (None, peer)]
        self._cut = cut
        self._segments = Segments(rail, call.op, call.size, cut.dtype, cut.longest, takers)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        give, take = self._cut.give(send), self._cut.take(recv)
        self.begin()
        yield from self._segments.reduce(give, take)


class Segments:
    """Data in segments, one for each rank of a rail, which reduces it chunk by chunk as the others' come.

    A chunk that is finished is sent on at once, to those who want it, while the next is added.

    Args:
        rail: The rail.
        op: The reduction.
        num_ranks: How many ranks' data is in it at the end.
        dtype: Of the segments.
        longest: Elements of the longest.
        takers: Who wants the segment that this rank reduces.
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
        """Reduce.

        Args:
            give: This rank's data for the segment of each rank.
            take: Where each rank's finished segment goes; None for those not wanted here.
        """
        rail = self._rail
        own, kept = give[rail.place], take[rail.place]
        total = np.empty_like(own) if kept is None else kept
        for begin in self._begins(self._longest):
            for peer in rail.others:
                self._send(peer, give[peer], begin)
        begins = self._begins(own.size)
        ahead = deque(self._expect(number, begin, own) for number, begin in enumerate(begins[:_AHEAD]))
        finished: list[Slot] = []
        for number, begin in enumerate(begins):
            if number + _AHEAD >= len(begins) and not finished:
                # Those of a rank follow its parts of this segment, all of which have their places now.
                finished = self._expect_finished(take)
            slots, parts = ahead.popleft()
            yield rail.coming(slots)
            piece = total[begin : begin + self._chunk]
            self._add(own[begin : begin + self._chunk], parts, piece)
            for peer in self._takers:
                rail.send(peer, bytes_of(piece))
            if number + _AHEAD < len(begins):
                ahead.append(self._expect(number + _AHEAD, begins[number + _AHEAD], own))
        yield rail.coming(finished)
        yield from rail.flush()

    def _begins(self, size: int) -> range:
        # A rank without elements has a part without as well: all hear of all.
        return range(0, max(size, 1), self._chunk)

    def _send(self, peer: int, block: Array, begin: int) -> None:
        if begin == 0 or begin < block.size:
            self._rail.send(peer, bytes_of(block[begin : begin + self._chunk]))

    def _expect(self, number: int, begin: int, own: Array) -> tuple[list[Slot], list[Array]]:
        rail, size = self._rail, min(self._chunk, own.size - begin)
        room = rail.scratch(_AHEAD * rail.size, CHUNK_BYTES)
        first = number % _AHEAD * rail.size
        parts = [room[first + peer, : size * own.itemsize].view(self._dtype) for peer in rail.others]
        return [rail.expect(peer, bytes_of(part)) for peer, part in zip(rail.others, parts, strict=True)], parts

    def _expect_finished(self, take: Blocks) -> list[Slot]:
        """Return the slots of the others' finished segments, where they are wanted."""
        rail = self._rail
        wanted = [(peer, block) for peer in rail.others if (block := take[peer]) is not None]
        return [
            rail.expect(peer, bytes_of(block[begin : begin + self._chunk]))
            for peer, block in wanted
            for begin in self._begins(block.size)
        ]

    def _add(self, own: Array, parts: list[Array], total: Array) -> None:
        run, combine = self._run, self._op.ufunc
        for part in parts:
            run(combine, own, part, out=total)
            own = total
        run(self._op.finish, total, self._num_ranks)
