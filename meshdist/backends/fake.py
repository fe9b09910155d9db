"""The `fake` backend: carries out the calls of one rank without peers, for dry runs.

Results are those of a world in which every rank passes the same arrays. Data that only another rank could send is zero:
a message, and the output of a scatter on a rank other than the source.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.backends.base import Backend, ComposedPlan, DefaultPlan, Plan
from meshdist.backends.p2p.own_messages import Sent
from meshdist.collectives.algorithms.blocks import flat
from meshdist.collectives.dataflow import ReductionSpec, TransferSpec
from meshdist.collectives.definition import definition_of
from meshdist.runtime.call import Buffers, Call, Signature
from meshdist.runtime.waiting import Found, Incoming, Probe, Waitable

# The reduction of any number of equal arrays is the array itself.
_IDEMPOTENT = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.AVG)


class FakeBackend(Backend):
    """A group of which only this rank exists."""

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        return Sent(dst)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        array[...] = 0
        sent = Sent(self._sender(src))
        sent.pickle = array  # empty, if it is one of objects
        return sent

    def probe(self, src: int | None, tag: int | None) -> Probe:
        return _Probed(self._sender(src), tag)

    def _sender(self, src: int | None) -> int:
        return (self.rank + 1) % self.size if src is None else src

    def meet(self, error_prefix: str, timeout_s: float, is_first: bool) -> None:
        return

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        return iter(())

    def prepare(self, call: Call) -> Plan:
        if call.collective.composition is not None:
            return ComposedPlan(self, call, call.collective.composition)
        if call.collective.native == "barrier":
            return _FakePlan(self, call, None)
        describe = definition_of(call.collective).dataflow.spec
        return DefaultPlan(self, call) if describe is None else _FakePlan(self, call, describe(call))


class _Probed(Sent, Probe):
    """A message without bytes, which is always there."""

    def __init__(self, source: int, tag: int | None) -> None:
        super().__init__(source)
        self._tag = tag or 0

    def found(self) -> Found:
        return Found(self.source, self._tag, 0)


class _FakePlan(Plan):
    def __init__(self, backend: Backend, call: Call, spec: TransferSpec | ReductionSpec | None) -> None:
        super().__init__(backend, call)
        self._call = call.without_buffers()
        self._spec = spec

    def run(self, send: Buffers, recv: Buffers) -> None:
        if isinstance(self._spec, ReductionSpec):
            _fill_reduced(self._call, self._spec, send, recv)
        elif self._spec is not None:
            _fill_moved(self._call, self._spec, send, recv)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        self.run(send, recv)
        return iter(())


def of_equal_arrays(op: ReduceOp, array: Array, num: int) -> Array:
    """Return the reduction of `num` arrays equal to `array`, with its shape and dtype."""
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


def _fill_reduced(call: Call, spec: ReductionSpec, send: Buffers, recv: Buffers) -> None:
    assert call.op is not None, "a reduction has an op"
    if spec.taker in (None, call.rank):
        own = spec.give(send)[call.rank] if spec.keeps else flat(send)
        flat(recv)[...] = of_equal_arrays(call.op, own, call.size)


def _fill_moved(call: Call, spec: TransferSpec, send: Buffers, recv: Buffers) -> None:
    if spec.giver not in (None, call.rank):
        if not call.collective.in_place:  # otherwise this rank's array stands for the source's
            flat(recv)[...] = 0
        return
    if spec.taker not in (None, call.rank) or call.collective.in_place:
        return
    # Every rank sends this rank the block that this rank sends to itself.
    own = flat(send) if spec.shared else spec.give(send)[call.rank]
    assert own is not None, "a rank that sends has a block for itself"
    if isinstance(recv, np.ndarray) and spec.giver is None and spec.longest is not None:
        recv.reshape(call.size, -1)[...] = own
        return
    for block in spec.take(recv):
        # Other ranks may have arrays of other sizes: repeat or truncate this one's elements.
        if block is not None:
            block[...] = own if block.size == own.size else np.resize(own, block.size)
