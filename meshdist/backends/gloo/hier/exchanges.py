"""Exchanges between hosts: broadcast, gather, scatter, all_gather, all_to_all and the barrier.

Every rank sends a frame to every other, with a block for it or empty. So each rank hears from all, and knows that all
make the same call. In large groups that is too much for little data. With several ranks on a host, an exchange whose
sizes no rank knows alone begins with a SmallAllgather of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.hier.call_tracker import CallTracker
from meshdist.backends.gloo.hier.hierarchy import Hierarchy
from meshdist.backends.gloo.hier.rail import Rail, RailPlan, bytes_of
from meshdist.backends.gloo.hier.small_allgather import SmallAllgather, put_side_by_side
from meshdist.backends.gloo.shm.move_plans import keep_own
from meshdist.collectives.algorithms.pairwise import exchange_blocks
from meshdist.collectives.dataflow import Blocks, TransferSpec
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.call_mismatch import compare_splits
from meshdist.runtime.waiting import Waitable

_EMPTY = memoryview(b"")


class FullExchange(RailPlan):
    """Every rank sends every other its block, all at once."""

    def __init__(self, rail: Rail, tracker: CallTracker, backend: Backend, call: Call, spec: TransferSpec) -> None:
        super().__init__(rail, tracker, backend, call)
        self._spec = spec
        self._takers = [spec.taker in (None, rank) for rank in range(rail.size)]

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        give, take = self._spec.give(send), self._spec.take(recv)
        rail = self.begin()
        slots = [rail.expect(peer, _bytes(take[peer])) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, _bytes(give[peer]) if self._takers[peer] else _EMPTY)
        keep_own(give[rail.place], take[rail.place])
        yield rail.frames_wait(slots)
        yield from rail.flush()


class AgreedExchange(RailPlan):
    """An exchange whose sizes no rank knows alone: each rank sends its sizes to all, followed by its block."""

    def __init__(self, rail: Rail, tracker: CallTracker, backend: Backend, call: Call, spec: TransferSpec) -> None:
        super().__init__(rail, tracker, backend, call)
        self._spec = spec
        # What each rank gives to and expects of each other; every call overwrites the rows of the others.
        self._sizes = np.empty((rail.size, 2, rail.size), np.int64)
        blocks = spec.give(call.send), spec.take(call.recv)
        self._sizes[rail.place] = call.splits or [[_size(block) for block in side] for side in blocks]
        self._rows = [bytes_of(row) for row in self._sizes]
        self._own = self._sizes[rail.place].tobytes()
        # The sizes when they were last compared.
        self._agreed = b""

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        give, take = self._spec.give(send), self._spec.take(recv)
        rail, rows = self.begin(), self._rows
        slots = [rail.expect(peer, rows[peer]) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, _bytes(give[peer]), before=self._own)
        yield rail.frames_wait(slots)
        self._compare()
        slots = [rail.expect(peer, _bytes(take[peer])) for peer in rail.others]
        keep_own(give[rail.place], take[rail.place])
        yield rail.frames_wait(slots)
        yield from rail.flush()

    def _compare(self) -> None:
        sizes = self._sizes
        said = sizes.tobytes()
        if said != self._agreed:
            compare_splits(sizes[:, 0], sizes[:, 1], self._spec.unit, self.backend.options.ranks)
            self._agreed = said


# Up to this many bytes a rank's blocks are sent with its sizes.
SHORT_BYTES = 1 << 10


class HierarchicalExchange(Plan):
    """All ranks learn all sizes and, if no rank gives much, all blocks; otherwise they then exchange the blocks."""

    def __init__(self, hierarchy: Hierarchy, backend: Backend, call: Call, spec: TransferSpec) -> None:
        super().__init__(backend, call)
        self._call = call.without_buffers()
        self._spec = spec
        sizes = [[block.nbytes for block in _blocks(blocks)] for blocks in (spec.give(call.send), spec.take(call.recv))]
        self._head = np.array(sizes, np.int64).reshape(-1).view(np.uint8)
        self._gives_little = sum(sizes[0]) <= SHORT_BYTES
        row_bytes = [self._head.size + SHORT_BYTES] * call.size
        self._know = SmallAllgather(hierarchy, backend, call, row_bytes, self._take, self._put)
        # The sizes when they were last compared, and where this rank's blocks begin in the rows.
        self._agreed: list[bytes] = []
        self._begins: list[int] | None = None

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        give, take = _blocks(self._spec.give(send)), _blocks(self._spec.take(recv))
        yield from self._know.steps(give, take)
        if self._begins is None:
            yield from exchange_blocks(self.backend, self._call, give, take)

    def _put(self, give: Any, row: Array) -> None:
        head = self._head
        row[: head.size] = head
        if self._gives_little:
            put_side_by_side(give, row[head.size :])

    def _take(self, rows: list[Array], take: Any) -> None:
        heads = [row[: self._head.size].tobytes() for row in rows]
        if heads != self._agreed:
            self._compare(heads)
        if self._begins is not None:
            for block, row, begin in zip(take, rows, self._begins, strict=True):
                as_bytes(block)[...] = row[begin : begin + block.nbytes]

    def _compare(self, heads: list[bytes]) -> None:
        sizes = np.frombuffer(b"".join(heads), np.int64).reshape(len(heads), 2, -1)
        given, expected = sizes[:, 0], sizes[:, 1]
        unit = self._spec.row_bytes
        compare_splits(given // unit, expected // unit, self._spec.unit, self.backend.options.ranks)
        self._agreed = heads
        is_short = given.sum(axis=1).max() <= SHORT_BYTES
        before = given[:, : self._call.rank].sum(axis=1)
        self._begins = (self._head.size + before).tolist() if is_short else None


def _blocks(blocks: Blocks) -> list[Array]:
    return [block for block in blocks if block is not None]


class FullBarrier(RailPlan):
    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        rail = self.begin()
        slots = [rail.expect(peer, _EMPTY) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, _EMPTY)
        yield rail.frames_wait(slots)
        yield from rail.flush()


def _size(block: Array | None) -> int:
    return 0 if block is None else block.size


def _bytes(block: Array | None) -> memoryview:
    return _EMPTY if block is None else bytes_of(block)
