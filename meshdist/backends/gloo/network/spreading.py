"""Broadcast of many bytes between three hosts or more: the root hands each rank a share, and all hand theirs around.

So the root sends the array not quite twice, however many ranks there are.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, Int. J. High
Perform. Comput. Appl. 19 (2005), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshdist.arrays import Array, as_bytes
from meshdist.backends.base import Backend
from meshdist.backends.gloo.network.agreement import Agreement
from meshdist.backends.gloo.network.rail import Rail, RailPlan, bytes_of
from meshdist.backends.gloo.wire.parts import Slot
from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import flat, shares_of
from meshdist.waiting import Waitable

# From here on it takes less time than to send all to each.
SPREAD_BYTES = 256 << 10
_CHUNK_BYTES = 256 << 10
_EMPTY = memoryview(b"")


class SpreadBroadcast(RailPlan):
    """Many bytes: chunk by chunk, each rank passes its share on to the others as it comes from the root."""

    def __init__(self, rail: Rail, agreement: Agreement, backend: Backend, call: Call) -> None:
        super().__init__(rail, agreement, backend, call)
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
        yield rail.coming(slots)

    def _pass_on(self, rail: Rail, shares: list[list[memoryview]]) -> Iterator[Waitable]:
        root = self._root
        peers = [peer for peer in rail.others if peer != root]
        own = [rail.expect(root, chunk) for chunk in shares[rail.place]]
        rest: list[Slot] = [rail.expect(peer, chunk) for peer in (root, *peers) for chunk in shares[peer]]
        rail.send(root, _EMPTY)
        for slot, chunk in zip(own, shares[rail.place], strict=True):
            yield rail.coming([slot])
            for peer in peers:
                rail.send(peer, chunk)
        yield rail.coming(rest)


def _chunks(share: Array) -> list[memoryview]:
    return [bytes_of(share[begin : begin + _CHUNK_BYTES]) for begin in range(0, max(share.size, 1), _CHUNK_BYTES)]
