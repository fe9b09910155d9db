"""Collectives of several arrays of each rank, which may lie on several GPUs of its process.

A rank has one GPU in a group. The arrays of the other GPUs are copied there, and reduced or joined to one array; NCCL
runs on that; the result is copied to the arrays. All of it is enqueued on the stream of the call. It begins after what
the current streams of all these GPUs have been asked to do, and these streams continue after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.device import cupy_module, plain
from meshdist.arrays.reduce_op import PremulSum, ReduceOp
from meshdist.backends.nccl.plans import NcclPlan
from meshdist.backends.nccl.reductions import joined, scaled
from meshdist.runtime.call import Call, each
from meshdist.runtime.flight_recorder import CallFacts

if TYPE_CHECKING:
    from meshdist.backends.nccl.comm_stream import LaunchStream


OVER_GPUS = (
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
)


class OverGpus:
    """The plan of a collective of several arrays of each rank; `inner` is that of one array."""

    apart = False  # all inputs are copied before an output is written
    facts: CallFacts | None = None

    def __init__(self, call: Call, inner: NcclPlan) -> None:
        self.rank, self.size, self.root = call.rank, call.size, call.root
        self._name, self._op, self._inner = call.collective.name, call.op, inner

    def launch(self, on: LaunchStream, send: Any, recv: Any) -> None:
        self._launch(on, send, recv, None)

    def launch_scaled(self, on: LaunchStream, send: Any, recv: Any, factor: PremulSum) -> None:
        """Enqueue a PREMUL_SUM: the reduction of arrays multiplied by a factor."""
        self._launch(on, send, recv, factor)

    def _launch(self, on: LaunchStream, send: Any, recv: Any, factor: PremulSum | None) -> None:
        gives, takes = each(send), each(recv)
        others = _Others(on, [*gives, *takes])
        if self._name == "broadcast_multigpu" and self.rank != self.root:
            gives = []
        sources = others.begin(gives)
        with on.stream:
            arrays = [others.brought(array) for array in sources]
            if factor is not None:
                arrays = scaled(arrays, factor)
            one, room = self._packed(arrays, takes)
            self._inner.launch(on, one, room)
            others.hand_out(self._results(room, takes))

    def _packed(self, arrays: list[Any], takes: list[Any]) -> tuple[Any, Any]:
        """Return the array that NCCL sends, and that which it receives in."""
        empty = cupy_module().empty
        if self._name == "broadcast_multigpu":
            one = arrays[0].copy() if arrays else empty(takes[0].shape, takes[0].dtype)
            return one, one
        if self._name == "all_gather_multigpu":
            one = joined(arrays, None)
            return one, empty(self.size * one.size, one.dtype)
        if self._name == "reduce_scatter_multigpu":
            length = isqrt(len(arrays) // self.size) * self.size
            lists = [arrays[begin : begin + length] for begin in range(0, len(arrays), length)]
            one = self._reduced([joined(each_list, None) for each_list in lists])
            return one, empty(one.size // self.size, one.dtype)
        one = self._reduced(arrays)
        return one, one

    def _reduced(self, arrays: list[Any]) -> Any:
        assert self._op is not None
        cupy = cupy_module()
        combine, total = getattr(cupy, self._op.ufunc.__name__), arrays[0].copy()
        for array in arrays[1:]:
            combine(total, array, out=total)
        if self._op is ReduceOp.AVG and len(arrays) > 1:
            cupy.multiply(total, total.dtype.type(1 / len(arrays)), out=total)
        return total

    def _results(self, room: Any, takes: list[Any]) -> list[tuple[Any, Any]]:
        """Return each output with the array that it gets."""
        if self._name in ("broadcast_multigpu", "all_reduce_multigpu"):
            return [(array, room) for array in takes]
        if self._name == "reduce_multigpu":
            return [(takes[0], room)] if self.rank == self.root else []
        flat, count = room.reshape(-1), takes[0].size
        # Each list of all_gather_multigpu gets the whole result.
        num = max(1, flat.size // max(1, count))
        starts = [place % num * count for place in range(len(takes))]
        return [(array, flat[begin : begin + count]) for begin, array in zip(starts, takes, strict=True)]


class _Others:
    """The GPUs of some arrays that are not the one of the call."""

    def __init__(self, on: LaunchStream, arrays: Sequence[Any]) -> None:
        self._on, self._cuda = on, on.cuda
        self._gpus = sorted({int(array.device.id) for array in arrays} - {on.device})

    def begin(self, arrays: Sequence[Any]) -> list[Any]:
        """Return contiguous arrays where each array lies; have the stream of the call wait for the streams there."""
        sources = list(arrays)
        for gpu in self._gpus:
            with self._cuda.Device(gpu):
                sources = [plain(array) if int(array.device.id) == gpu else array for array in sources]
                event = self._cuda.Event(disable_timing=True)
                event.record(self._cuda.get_current_stream())
            self._on.stream.wait_event(event)
        return sources

    def brought(self, array: Any) -> Any:
        """Return an array on the GPU of the call with the elements of a contiguous one."""
        if int(array.device.id) == self._on.device:
            return array
        room = cupy_module().empty(array.shape, array.dtype)
        self._copy(array, room)
        return room

    def hand_out(self, results: list[tuple[Any, Any]]) -> None:
        """Copy each result to its array; have the current streams of these GPUs wait for that."""
        cupy = cupy_module()
        strided = []
        for array, result in results:
            gpu = int(array.device.id)
            if gpu == self._on.device:
                array[...] = result.reshape(array.shape)
            elif array.flags.c_contiguous:
                self._copy(result, array)
            else:
                with self._cuda.Device(gpu):
                    room = cupy.empty(array.shape, array.dtype)
                self._copy(result, room)
                strided.append((gpu, array, room))
        end = self._cuda.Event(disable_timing=True)
        end.record(self._on.stream)
        for gpu in self._gpus:
            with self._cuda.Device(gpu):
                self._cuda.get_current_stream().wait_event(end)
                for of_gpu, array, room in strided:
                    if of_gpu == gpu:
                        array[...] = room

    def _copy(self, source: Any, target: Any) -> None:
        if source.nbytes:
            self._cuda.runtime.memcpyPeerAsync(
                target.data.ptr,
                int(target.device.id),
                source.data.ptr,
                int(source.device.id),
                source.nbytes,
                self._on.stream_address,
            )


def over_gpus(call: Call, plan_of: Callable[[Call], NcclPlan]) -> OverGpus:
    """Return the plan of a collective of several arrays of each rank; `plan_of` returns that of one array.

    Raises:
        TypeError: NCCL or CuPy does not reduce the dtype.
    """
    composition, first = call.collective.composition, each(call.send)[0]
    assert composition is not None
    if call.op is not None and first.dtype.kind not in "biufc":
        raise TypeError(
            f"{call.error_prefix}: CuPy does not reduce the {first.dtype} arrays of a rank; convert them to float32"
            " first"
        )
    # The inner plan takes notice of the shape and the dtype of what NCCL gets, and of nothing else.
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "all_gather_multigpu": ((len(each(call.send)) * first.size,), (len(each(call.send)) * call.size * first.size,)),
        "reduce_scatter_multigpu": (
            (len(each(call.recv)) * call.size * first.size,),
            (len(each(call.recv)) * first.size,),
        ),
    }
    given, taken = shapes.get(call.collective.name, (first.shape, first.shape))
    send, recv = (np.broadcast_to(np.empty((), first.dtype), shape) for shape in (given, taken))
    return OverGpus(call, plan_of(call._replace(collective=composition.inner, send=send, recv=recv)))
