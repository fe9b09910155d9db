"""Broadcast of many bytes between three hosts or more: the root scatters shares, and the ranks gather all of them.

So the root sends the array not quite twice, however many ranks there are.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, Int. J. High
Perform. Comput. Appl. 19 (2005), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.base import Backend
from meshdist.backends.gloo.hier.call_tracker import CallTracker
from meshdist.backends.gloo.hier.rail import Rail, RailPlan, bytes_of
from meshdist.backends.gloo.tcp.collective_frames import ExpectedFrame
from meshdist.collectives.algorithms.blocks import flat, shares_of
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.waiting import Waitable

# From here on this takes less time than sending the whole array to each rank.
SPREAD_BYTES = 256 << 10
_CHUNK_BYTES = 256 << 10
_EMPTY = memoryview(b"")


class ScatterAllgatherBroadcast(RailPlan):
    """Many bytes: chunk by chunk, each rank forwards its share to the others as it arrives from the root."""

    def __init__(self, rail: Rail, tracker: CallTracker, backend: Backend, call: Call) -> None:
        super().__init__(rail, tracker, backend, call)
        assert call.root is not None
        self._root = call.root

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        rail = self.begin()
        shares = [_chunks(share) for share in shares_of(as_bytes(flat(recv)), rail.size)]
        yield from self._give(rail, shares) if rail.place == self._root else self._pass_on(rail, shares)
        yield from rail.flush()

    def _give(self, rail: Rail, shares: list[list[memoryview]]) -> Iterator[Waitable]:
        slots = [rail.expect(peer, _EMPTY) for peer in rail.others]
        for peer in rail.others:
            for chunk in shares[peer]:
                rail.send(peer, chunk)
        for chunk in shares[rail.place]:
            for peer in rail.others:
                rail.send(peer, chunk)
        yield rail.frames_wait(slots)

    def _pass_on(self, rail: Rail, shares: list[list[memoryview]]) -> Iterator[Waitable]:
        root = self._root
        peers = [peer for peer in rail.others if peer != root]
        own = [rail.expect(root, chunk) for chunk in shares[rail.place]]
        rest: list[ExpectedFrame] = [rail.expect(peer, chunk) for peer in (root, *peers) for chunk in shares[peer]]
        rail.send(root, _EMPTY)
        for slot, chunk in zip(own, shares[rail.place], strict=True):
            yield rail.frames_wait([slot])
            for peer in peers:
                rail.send(peer, chunk)
        yield rail.frames_wait(rest)


def _chunks(share: Array) -> list[memoryview]:
    return [bytes_of(share[begin : begin + _CHUNK_BYTES]) for begin in range(0, max(share.size, 1), _CHUNK_BYTES)]
