"""Data movement between hosts: every rank sends a frame to every other, with a block for it or empty.

So each rank hears from all, and knows that all make the same call. In large groups that is too much for little data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.base import Backend
from meshdist.backends.gloo.hier.call_tracker import CallTracker
from meshdist.backends.gloo.hier.rail import Rail, RailPlan, bytes_of
from meshdist.backends.gloo.shm.movement import keep_own
from meshdist.collectives.dataflow import TransferSpec
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.call_check import compare_splits
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
