"""all_reduce in log2(size) rounds, for groups that are too large for every rank to send to all others directly.

Few bytes: recursive doubling, the whole array in every round. More: recursive halving until every rank has reduced a
block, then doubling until all have all. If the number of ranks is no power of two, those beyond the last one first send
their arrays to others, and receive the result at the end.
R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, Int. J. High
Perform. Comput. Appl. 19 (2005), section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import quiet_runner
from meshdist.backends.base import Backend
from meshdist.backends.gloo.hier.call_tracker import CallTracker
from meshdist.backends.gloo.hier.rail import Rail, RailPlan, bytes_of
from meshdist.collectives.algorithms.blocks import flat, shares_of
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.waiting import Waitable

# Up to here the whole array goes in every round, and up to the second limit in halves (as in MPICH); more in a ring.
DOUBLING_BYTES = 16 << 10
HALVING_BYTES = 1 << 20


class DoublingReduce(RailPlan):
    """Few bytes: round k exchanges with the rank whose place differs in bit k.

    Both add the sum of the lower places to that of the higher ones in the same order, so all have the same last bit.
    """

    def __init__(self, rail: Rail, tracker: CallTracker, backend: Backend, call: Call) -> None:
        super().__init__(rail, tracker, backend, call)
        assert call.op is not None
        self._op = call.op
        self._run = quiet_runner()
        self._num_in = 1 << (rail.size.bit_length() - 1)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        self.begin()
        array = flat(recv)
        room = self.rail.scratch.take(array.nbytes)
        yield from self._fold(array, room)
        if self.rail.place < self._num_in:
            yield from self._rounds(array, room)
            self._run(self._op.finish, array, self.rail.size)
        yield from self._unfold(array)

    def _rounds(self, array: Array, room: Array) -> Iterator[Waitable]:
        distance, other = 1, room[: array.nbytes].view(array.dtype)
        while distance < self._num_in:
            partner = self.rail.place ^ distance
            yield from self._exchange(partner, array, other)
            self._add(partner, array, other)
            distance *= 2

    def _exchange(self, partner: int, give: Array, take: Array) -> Iterator[Waitable]:
        slot = self.rail.expect(partner, bytes_of(take))
        self.rail.send(partner, bytes_of(give))
        yield self.rail.frames_wait([slot])
        yield from self.rail.flush()

    def _add(self, partner: int, array: Array, other: Array) -> None:
        first, second = (other, array) if partner < self.rail.place else (array, other)
        self._run(self._op.ufunc, first, second, out=array)

    def _fold(self, array: Array, room: Array) -> Iterator[Waitable]:
        """Send the arrays of ranks from `num_in` on to the ranks `num_in` places before."""
        rail, num_in = self.rail, self._num_in
        if rail.place >= num_in:
            rail.send(rail.place - num_in, bytes_of(array))
            yield from rail.flush()
        elif rail.place + num_in < rail.size:
            other = room[: array.nbytes].view(array.dtype)
            yield rail.frames_wait([rail.expect(rail.place + num_in, bytes_of(other))])
            self._add(rail.place + num_in, array, other)

    def _unfold(self, array: Array) -> Iterator[Waitable]:
        rail, num_in = self.rail, self._num_in
        if rail.place >= num_in:
            yield rail.frames_wait([rail.expect(rail.place - num_in, bytes_of(array))])
        elif rail.place + num_in < rail.size:
            rail.send(rail.place + num_in, bytes_of(array))
            yield from rail.flush()


class HalvingReduce(DoublingReduce):
    """More bytes: recursive halving, then doubling."""

    def _rounds(self, array: Array, room: Array) -> Iterator[Waitable]:
        # This rank still reduces the blocks from `low` to `high`, one for each rank that is still a partner.
        ends = [0, *accumulate(share.size for share in shares_of(array, self._num_in))]
        place, low, high = self.rail.place, 0, self._num_in
        while high - low > 1:
            distance = (high - low) // 2
            middle, partner = low + distance, place ^ distance
            kept, given = (low, middle), (middle, high)
            if place & distance:
                kept, given = given, kept
            low, high = kept
            part = array[ends[low] : ends[high]]
            other = room[: part.nbytes].view(array.dtype)
            yield from self._exchange(partner, array[ends[given[0]] : ends[given[1]]], other)
            self._add(partner, part, other)
        while high - low < self._num_in:
            distance = high - low
            partner = place ^ distance
            begin = low - distance if place & distance else high
            taken = array[ends[begin] : ends[begin + distance]]
            yield from self._exchange(partner, array[ends[low] : ends[high]], taken)
            low, high = min(low, begin), max(high, begin + distance)


def plan_rounds(rail: Rail, tracker: CallTracker, backend: Backend, call: Call) -> RailPlan | None:
    """Return the plan of an all_reduce in rounds; None if its array is too long."""
    assert isinstance(call.recv, np.ndarray)
    if call.recv.nbytes <= DOUBLING_BYTES:
        return DoublingReduce(rail, tracker, backend, call)
    return HalvingReduce(rail, tracker, backend, call) if call.recv.nbytes <= HALVING_BYTES else None
