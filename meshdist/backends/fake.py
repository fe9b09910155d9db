"""The backend `fake`: carries out the calls of one rank that has no peers, for dry runs.

Results are those of a world in which every rank gives the arrays that this rank gives. What only another rank could
give is zero: a message, and what a rank that is not the source gets from a scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Backend, Incoming, Plan
from meshdist.backends.staged_plan import StagedPlan
from meshdist.call import Buffers, Call, Signature
from meshdist.collectives.algorithms.blocks import blocks_of, flat
from meshdist.collectives.algorithms.pairwise import split_blocks
from meshdist.reduce_op import ReduceOp
from meshdist.waiting import Doorbell, Waitable

# Of as many equal arrays as you like, the reduction is the array itself.
_IDEMPOTENT = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.AVG)

# Writes what a call receives: (call, send, recv).
_Filler: TypeAlias = "Callable[[Call, Buffers, Buffers], None]"


class FakeBackend(Backend):
    """A group of which only this rank is there."""

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        return _Done(dst)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        array[...] = 0
        return _Done((self.rank + 1) % self.size if src is None else src)

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        return iter(())

    def prepare(self, call: Call) -> Plan:
        if call.collective.staging is not None:
            return StagedPlan(self, call, call.collective.staging)
        return _FakePlan(self, call, _FILLERS[call.collective.native])


class _Done(Incoming):
    """A message that nobody waits for."""

    def __init__(self, source: int) -> None:
        self.source = source

    def ready(self) -> bool:
        return True

    def check(self) -> None: ...

    def arm(self, bell: Doorbell) -> None: ...

    def disarm(self, bell: Doorbell) -> None: ...

    def missing(self) -> str:
        return "nobody"


class _FakePlan(Plan):
    def __init__(self, backend: Backend, call: Call, fill: _Filler) -> None:
        super().__init__(backend, call)
        self._call = call.without_buffers()
        self._fill = fill

    def run(self, send: Buffers, recv: Buffers) -> None:
        self._fill(self._call, send, recv)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        self.run(send, recv)
        return iter(())


def of_equal_arrays(op: ReduceOp, array: Array, num: int) -> Array:
    """Return the reduction of `num` arrays that are all equal to `array`, of its shape and dtype.

    Example:
        >>> of_equal_arrays(ReduceOp.SUM, np.array([1, 2]), 5)
        array([ 5, 10])
    """
    if op in _IDEMPOTENT:
        return array
    # By squaring: in round k, `power` is the reduction of 2 ** k arrays.
    total, power = None, array
    while True:
        if num & 1:
            total = power if total is None else op.ufunc(total, power)
        num >>= 1
        if not num:
            assert total is not None, "there is at least one rank"
            return total
        power = op.ufunc(power, power)


def _nothing(call: Call, send: Buffers, recv: Buffers) -> None:
    """Leave all as it is: in a broadcast, this rank's array is that of the source."""


def _reduced(call: Call, send: Buffers, recv: Buffers) -> None:
    if call.root in (None, call.rank):
        _write_reduced(call, flat(send), flat(recv))


def _reduced_block(call: Call, send: Buffers, recv: Buffers) -> None:
    _write_reduced(call, _own_block(call, send, None), flat(recv))


def _write_reduced(call: Call, array: Array, recv: Array) -> None:
    assert call.op is not None, "a reduction has an op"
    recv[...] = of_equal_arrays(call.op, array, call.size)


def _gathered(call: Call, send: Buffers, recv: Buffers) -> None:
    if call.root not in (None, call.rank):
        return
    if isinstance(recv, np.ndarray):
        recv.reshape(call.size, -1)[...] = flat(send)
    else:
        _fill_each(blocks_of(recv, call.size), flat(send))


def _scattered(call: Call, send: Buffers, recv: Buffers) -> None:
    flat(recv)[...] = blocks_of(send, call.size)[call.rank] if call.rank == call.root else 0


def _exchanged(call: Call, send: Buffers, recv: Buffers) -> None:
    # Every rank sends this rank what this rank would send to itself.
    if isinstance(recv, np.ndarray) and call.splits is None:
        recv.reshape(call.size, -1)[...] = _own_block(call, send, None)
        return
    rows_to, rows_from = call.splits if call.splits is not None else (None, None)
    _fill_each(split_blocks(recv, rows_from, call.size), _own_block(call, send, rows_to))


def _own_block(call: Call, send: Buffers, rows: tuple[int, ...] | None) -> Array:
    return split_blocks(send, rows, call.size)[call.rank]


def _fill_each(blocks: list[Array], array: Array) -> None:
    # Ranks may give arrays of other sizes: then this one's elements over and over, or its first.
    for block in blocks:
        block[...] = array if block.size == array.size else np.resize(array, block.size)


_FILLERS: dict[str, _Filler] = {
    "all_reduce": _reduced,
    "reduce": _reduced,
    "reduce_scatter": _reduced_block,
    "reduce_scatter_tensor": _reduced_block,
    "broadcast": _nothing,
    "all_gather": _gathered,
    "all_gather_into_tensor": _gathered,
    "gather": _gathered,
    "scatter": _scattered,
    "all_to_all": _exchanged,
    "all_to_all_single": _exchanged,
    "barrier": _nothing,
}
