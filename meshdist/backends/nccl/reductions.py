"""The reductions of the `nccl` backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.device import cupy_module, plain
from meshdist.arrays.reduce_op import PremulSum
from meshdist.backends.nccl.dtypes import Reduction, reduction_of
from meshdist.backends.nccl.plans import AllGather, NcclPlan, is_plain
from meshdist.runtime.call import Call, each

if TYPE_CHECKING:
    from meshdist.backends.nccl.comm_stream import LaunchStream


class Reducing(NcclPlan):
    """Base of reductions that NCCL carries out."""

    def __init__(self, call: Call, reduction: Reduction) -> None:
        super().__init__(call)
        self.reduction = reduction
        self.op = reduction.op
        self.computes = reduction.wide is not None or reduction.is_parity

    def launch_scaled(self, on: LaunchStream, send: Any, recv: Any, factor: PremulSum) -> None:
        """Enqueue a PREMUL_SUM: the reduction of arrays multiplied by a factor."""
        if factor.factor.ndim or not self.reduction.takes_factor:
            with on.stream:
                self._run(on, scaled(send, factor), send, recv)
            return
        dtype = each(send)[0].dtype
        comm = on.communicator
        op = comm.premul_sum(factor.factor.astype(dtype).tobytes(), self.reduction.dtype)
        try:
            if is_plain(send) and is_plain(recv) and not self.computes:
                self.enqueue(on, send, recv, op)
                return
            with on.stream:
                sent, received = self.prepare(send, recv)
                self.enqueue(on, sent, received, op)
                self.finish(received, recv)
        finally:
            comm.drop_op(op)

    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        self.enqueue(on, sent, received, self.op)

    @abstractmethod
    def enqueue(self, on: LaunchStream, sent: Any, received: Any, op: int) -> None:
        """Enqueue NCCL's operation."""

    def enqueue_to(self, root: int, on: LaunchStream, sent: Any, received: Any, op: int) -> None:
        """Enqueue NCCL's reduce of one array to one rank."""
        count = sent.size * self.reduction.parts
        if count:
            target = received.data.ptr if self.rank == root else 0
            on.communicator.reduce(sent.data.ptr, target, count, self.reduction.dtype, op, root, on.stream_address)

    def prepare(self, send: Any, recv: Any) -> tuple[Any, Any]:
        sent = self.given(send)
        if recv is send:
            return sent, sent
        return sent, self.room(recv)

    def given(self, array: Any) -> Any:
        """Return a contiguous array of the dtype that NCCL reduces."""
        wide = self.reduction.wide
        return plain(array if wide is None else array.astype(wide))

    def room(self, array: Any) -> Any:
        """Return the array that receives the result for `array`."""
        wide = self.reduction.wide
        if wide is None and array.flags.c_contiguous:
            return array
        return cupy_module().empty(array.shape, wide or array.dtype)

    def finish(self, received: Any, recv: Any) -> None:
        if self.reduction.is_parity:
            bits = received.view(np.uint8)
            cupy_module().bitwise_and(bits, np.uint8(1), out=bits)
        if received is not recv:
            recv[...] = received if received.dtype == recv.dtype else received.astype(recv.dtype)

    def _run(self, on: LaunchStream, given: Any, send: Any, recv: Any) -> None:
        sent, received = self.prepare(given, given if recv is send else recv)
        self.enqueue(on, sent, received, self.op)
        self.finish(received, recv)


def scaled(buffers: Any, factor: PremulSum) -> Any:
    """Return new arrays, the given ones times the factor, on the current stream."""
    cupy = cupy_module()

    def product(array: Any) -> Any:
        number = factor.factor.astype(array.dtype)
        return cupy.multiply(array, cupy.asarray(number) if number.ndim else number[()])

    return [product(array) for array in buffers] if isinstance(buffers, list) else product(buffers)


class AllReduce(Reducing):
    def enqueue(self, on: LaunchStream, sent: Any, received: Any, op: int) -> None:
        count = sent.size * self.reduction.parts
        if count:
            on.communicator.all_reduce(
                sent.data.ptr, received.data.ptr, count, self.reduction.dtype, op, on.stream_address
            )


class Reduce(Reducing):
    """In place on the root; the other ranks' arrays stay unchanged."""

    def enqueue(self, on: LaunchStream, sent: Any, received: Any, op: int) -> None:
        self.enqueue_to(self.root or 0, on, sent, received, op)

    def finish(self, received: Any, recv: Any) -> None:
        if self.rank == self.root:
            super().finish(received, recv)


class ReduceScatter(Reducing):
    def enqueue(self, on: LaunchStream, sent: Any, received: Any, op: int) -> None:
        count = received.size * self.reduction.parts
        if count:
            on.communicator.reduce_scatter(
                sent.data.ptr, received.data.ptr, count, self.reduction.dtype, op, on.stream_address
            )


class ReduceScatterList(ReduceScatter):
    """The arrays of a list, all of one size, through one array."""

    def __init__(self, call: Call, reduction: Reduction) -> None:
        super().__init__(call, reduction)
        self.computes = True

    def given(self, array: Any) -> Any:
        return joined(array, self.reduction.wide)


class ReduceScatterVarying(Reducing):
    """The arrays of a list, of different sizes: a reduce to each rank."""

    def given(self, array: Any) -> Any:
        return [super(ReduceScatterVarying, self).given(block) for block in array]

    def enqueue(self, on: LaunchStream, sent: Any, received: Any, op: int) -> None:
        with on.grouped():
            for root, block in enumerate(sent):
                self.enqueue_to(root, on, block, received, op)


class Coalesced(Reducing):
    """Several reductions of one kind as one operation; `single` is the plan for one array."""

    def __init__(self, call: Call, reduction: Reduction, single: Reducing) -> None:
        super().__init__(call, reduction)
        self._single = single

    def prepare(self, send: Any, recv: Any) -> tuple[Any, Any]:
        pairs = [self._single.prepare(given, taken) for given, taken in zip(send, recv, strict=True)]
        return [sent for sent, _ in pairs], [received for _, received in pairs]

    def enqueue(self, on: LaunchStream, sent: Any, received: Any, op: int) -> None:
        with on.grouped():
            for given, taken in zip(sent, received, strict=True):
                self._single.enqueue(on, given, taken, op)

    def finish(self, received: Any, recv: Any) -> None:
        for room, array in zip(received, recv, strict=True):
            self._single.finish(room, array)


class Gathered(AllGather):
    """A reduction that NCCL lacks: every rank gathers all arrays and reduces them itself, in rank order."""

    computes = True

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        assert call.op is not None
        self._op = call.op
        self._scatters = call.collective.native.startswith("reduce_scatter")
        sizes = [block.size for block in call.send] if isinstance(call.send, list) else None
        first = each(call.send)[0]
        even = first.size // call.size if self._scatters else first.size
        if not self._scatters:
            self._part = slice(0, first.size)
        elif sizes is None:
            self._part = slice(call.rank * even, (call.rank + 1) * even)
        else:
            self._part = slice(sum(sizes[: call.rank]), sum(sizes[: call.rank + 1]))

    def launch_scaled(self, on: LaunchStream, send: Any, recv: Any, factor: PremulSum) -> None:
        with on.stream:
            sent, received = self.prepare(scaled(send, factor), recv)
            self.go(on, sent, received)
            self.finish(received, recv)

    def prepare(self, send: Any, recv: Any) -> tuple[Any, Any]:
        sent = joined(send, None) if isinstance(send, list) else plain(send)
        return sent, cupy_module().empty((self.size, sent.size), sent.dtype)

    def finish(self, received: Any, recv: Any) -> None:
        if self.root not in (None, self.rank):
            return
        combine = getattr(cupy_module(), self._op.ufunc.__name__)
        total = received[0][self._part]
        for rank in range(1, self.size):
            combine(total, received[rank][self._part], out=total)
        recv[...] = total.reshape(recv.shape)


def joined(arrays: list[Any], wide: np.dtype[Any] | None) -> Any:
    """Return the elements of all arrays as one flat array, converted to a dtype, on the current stream."""
    whole = cupy_module().empty(sum(array.size for array in arrays), wide or arrays[0].dtype)
    begin = 0
    for array in arrays:
        if array.size:
            whole[begin : begin + array.size].reshape(array.shape)[...] = array
        begin += array.size
    return whole


_SINGLE: Mapping[str, Callable[[Call, Reduction], Reducing]] = {
    "all_reduce": AllReduce,
    "reduce": Reduce,
    "reduce_scatter_tensor": ReduceScatter,
}
_COALESCED: Mapping[str, Callable[[Call, Reduction], Reducing]] = {
    "all_reduce_coalesced": AllReduce,
    "reduce_scatter_tensor_coalesced": ReduceScatter,
}


def reduction_plan(call: Call) -> Reducing | Gathered:
    """Return the plan of a reduction; raise TypeError if neither NCCL nor CuPy reduces the dtype."""
    assert call.op is not None
    dtype = each(call.send)[0].dtype
    reduction, name = reduction_of(dtype, call.op), call.collective.name
    if name in _COALESCED:
        if reduction is None:
            raise TypeError(
                f"{call.error_prefix}: NCCL does not reduce {dtype} by {call.op.name}; call it for each array by itself"
            )
        return Coalesced(call, reduction, _COALESCED[name](call, reduction))
    if reduction is None:
        if dtype.kind not in "biufc":
            raise TypeError(
                f"{call.error_prefix}: neither NCCL nor CuPy reduces {dtype} by {call.op.name}; convert it to"
                " float32 first"
            )
        return Gathered(call)
    if call.collective.native != "reduce_scatter":
        return _SINGLE[call.collective.native](call, reduction)
    assert isinstance(call.send, list)
    if len({block.size for block in call.send}) == 1:
        return ReduceScatterList(call, reduction)
    return ReduceScatterVarying(call, reduction)
