"""NcclCalls: the way of a group's calls on arrays in the memory of a GPU, to NCCL.

Nothing here waits for the device, but a barrier. A call is checked as one on the CPU is, enqueued by the thread that
makes it, and done when the device comes to it. What the ranks call is not compared: that would have to wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdist.backends.matching import eager_bytes
from meshdist.backends.nccl import plans
from meshdist.backends.nccl.lane import Flight, Lane
from meshdist.backends.nccl.mail import Batch, Message
from meshdist.backends.nccl.plans import NcclPlan, each
from meshdist.backends.nccl.reductions import Coalesced, Gathered, Reducing, reduction_plan
from meshdist.backends.nccl.works import DeviceWork
from meshdist.call import Call
from meshdist.cupy_arrays import as_device_array, as_device_buffers, cupy_module, device_of, on_current_stream, outlines
from meshdist.debug.flight_recorder import facts_of
from meshdist.device_calls import DeviceCalls, Parcel, Request
from meshdist.errors import DistBackendError, DistError
from meshdist.overlap import must_copy
from meshdist.plan_key import remember
from meshdist.reduce_op import PremulSum, as_reduce_op
from meshdist.work import Work

if TYPE_CHECKING:
    from meshdist.backends.nccl.backend import NcclBackend
    from meshdist.process_group import ProcessGroup

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_COALESCED = ("all_reduce_coalesced", "reduce_scatter_tensor_coalesced")
_PLANS: dict[str, Callable[[Call], NcclPlan]] = {
    "all_gather_into_tensor": plans.AllGather,
    "all_gather_coalesced": plans.AllGatherCoalesced,
    "all_gather_into_tensor_coalesced": plans.AllGatherCoalesced,
    "all_to_all": plans.AllToAll,
    "all_to_all_single": plans.AllToAll,
    "barrier": plans.Barrier,
    "broadcast": plans.Broadcast,
    "gather": plans.Gather,
    "scatter": plans.Scatter,
}
# The collectives that NCCL carries, by the names of their native forms.
CARRIED = frozenset((*_REDUCTIONS, *_COALESCED, *_PLANS, "all_gather"))


class NcclCalls(DeviceCalls):
    """The calls of one group.

    Args:
        backend: The group's engine.
    """

    def __init__(self, backend: NcclBackend) -> None:
        self._backend = backend
        self._plans: dict[Any, NcclPlan] = {}
        self._array = cupy_module().ndarray
        self._scratch: Any = None
        self._eager_bytes = eager_bytes()
        self._batch: Batch | None = None

    @property
    def device(self) -> int | None:  # type: ignore[override]
        return self._backend.device

    def submit(self, request: Request) -> Any:
        group, collective, where = request.group, request.collective, request.where
        send, recv = request.send, request.recv
        if recv is send and type(recv) is self._array and recv.flags.c_contiguous and not request.compares:
            # One array, in place, as most are. Where there is a plan there is nothing to be said against it.
            known = self._plans.get((collective, (recv.dtype, recv.shape), None, request.op, request.root, None))
            if known is not None:
                return self._carry_out(request, known, recv, recv, int(recv.device.id))
        if send is None and recv is None and collective.native == "barrier":
            return self._barrier(request)
        in_place = collective.in_place and recv is send
        names, lists = collective.names, collective.lists
        given = group.named(where, _taken, send, names[0], "send" in lists, in_place)
        taken = given if in_place else group.named(where, _taken, recv, names[1], "recv" in lists, True)
        device = group.named(where, device_of, [*each(given), *([] if in_place else each(taken))])
        factor = request.op if isinstance(request.op, PremulSum) else None
        op = None if request.op is None else group.named(where, as_reduce_op, request.op)
        key = (collective, _shapes(taken), None if in_place else _shapes(given), op, request.root, request.splits)
        plan: NcclPlan | Scaled | None = self._plans.get(key)
        if plan is None or request.compares:
            rank, size, root, compares = group.rank(), group.size(), request.root, request.compares
            call = Call(collective, where, rank, size, given, taken, op, root, request.splits, compares)
            collective.check(call)
            made = self._plan_of(call)
            made.facts = facts_of(call, group.name, group.label, group.timeout_s)
            plan = made
            remember(self._plans, key, made)
            if request.compares:
                self._compare(request, call)
        if factor is not None:
            for array in each(given):
                group.named(where, factor.check, array, names[0])
            assert isinstance(plan, (Reducing, Gathered))
            plan = Scaled(plan, factor)
        if plan.apart and not in_place and given is not None and taken is not None:
            given = self._apart(given, taken, group, op is not None)
        return self._carry_out(request, plan, given, taken, device)

    def _compare(self, request: Request, call: Call) -> None:
        try:
            self._backend.compare(call, request.where)
        except BaseException as error:
            raise request.group.fail(error, request.where) from None

    def _carry_out(self, request: Request, plan: NcclPlan | Scaled, given: Any, taken: Any, device: int | None) -> Any:
        timeout_s = request.group.timeout_s if request.timeout_s is None else request.timeout_s
        if request.async_op:
            work = DeviceWork(request.where, request.recv)
            self._launch(request, plan, given, taken, device, timeout_s, (work,))
            return work
        flight = self._launch(request, plan, given, taken, device, timeout_s, ())
        # The caller's stream goes on behind the call, and the host goes on at once.
        assert self._backend.device is not None
        on_current_stream(self._backend.device, lambda stream: stream.wait_event(flight.end))
        return request.recv

    def send(self, parcel: Parcel) -> None:
        array = parcel.group.named(parcel.where, lambda: as_device_array(parcel.tensor, "tensor"))
        if array.nbytes > self._eager_bytes:
            self.isend(parcel).wait()
            return
        # A copy, by the caller's stream, which then goes on: the lane keeps the copy until it is sent.
        with self._backend.cuda.Device(int(array.device.id)):
            buffered = array.copy()
        self.isend(replace(parcel, tensor=buffered))

    def recv(self, parcel: Parcel) -> int:
        self.irecv(parcel).wait()
        assert parcel.peer is not None
        return parcel.peer

    def isend(self, parcel: Parcel) -> Work:
        return self._message(parcel, is_send=True)

    def irecv(self, parcel: Parcel) -> Work:
        if parcel.peer is None:
            raise ValueError(f"{parcel.where}: NCCL receives from a rank that is named, not from any; give src")
        return self._message(parcel, is_send=False)

    def connect(self, where: str) -> None:
        self._backend.lane(where, None)

    def begin_batch(self) -> None:
        self._batch = Batch()

    def end_batch(self, group: ProcessGroup, where: str | None) -> None:
        batch, self._batch = self._batch, None
        if batch is None or not batch.messages:
            return
        if where is None:
            for message in batch.messages:
                message.work.settle(DistError("another message of its batch was refused, so it was not posted"))
            return
        device = group.named(where, device_of, [message.array for message in batch.messages])
        works = [message.work for message in batch.messages]
        self._post(
            group,
            where,
            lambda: self._backend.lane(where, device),
            lambda lane: lane.launch(batch, batch.messages, None, where, group.timeout_s, works, batch.records()),
        )

    def _message(self, parcel: Parcel, *, is_send: bool) -> Work:
        group, where = parcel.group, parcel.where
        if parcel.tag:
            raise ValueError(
                f"{where}: NCCL has no tags, messages between two ranks keep their order; got tag {parcel.tag}"
            )
        assert parcel.peer is not None
        array = group.named(where, lambda: as_device_array(parcel.tensor, "tensor", written=not is_send))
        source = None if is_send else group.global_rank(parcel.peer)
        work = DeviceWork(where, None if is_send else parcel.tensor, source=source)
        record = group.messages.begin_record(parcel.of, array, parcel.peer, parcel.tag)
        message = Message(array, parcel.peer, work, record, is_send=is_send)
        if self._batch is not None:
            self._batch.messages.append(message)
            return work
        # On a lane between the two ranks, the sender is the first.
        message.peer = int(is_send)
        device, backend = int(array.device.id), self._backend
        self._post(
            group,
            where,
            lambda: backend.pair(parcel.peer or 0, where, device),
            lambda pair: pair.post(Batch([message]), where, group.timeout_s, (work,), is_send=is_send),
        )
        return work

    def _post(self, group: ProcessGroup, where: str, find: Callable[[], Any], post: Callable[[Any], object]) -> None:
        try:
            self._run(find(), post)
        except ValueError:  # an array on the wrong GPU: nothing was sent
            raise
        except BaseException as error:
            raise group.fail(error, where) from None

    def _launch(
        self, request: Request, plan: Any, send: Any, recv: Any, device: int | None, timeout_s: float, works: Any
    ) -> Flight:
        group, where = request.group, request.where
        group.num_calls += 1
        record = group.recorder.begin(plan.facts, group.num_calls)
        try:
            lane = self._backend.lane(where, device)
            flight: Flight = self._run(
                lane, lambda lane: lane.launch(plan, send, recv, where, timeout_s, works, (record,))
            )
        except ValueError as error:  # the array is on the wrong GPU, and nothing was sent
            group.recorder.end(record, error)
            raise
        except BaseException as error:
            raise group.fail(error, where, record) from None
        return flight

    def _run(self, where_to: Any, launch: Callable[[Any], Any]) -> Any:
        """Call `launch` with a lane, or a pair, with their GPU as the current device."""
        backend = self._backend
        try:
            if backend.cuda.runtime.getDevice() == backend.device:
                result = launch(where_to)
            else:
                with backend.cuda.Device(backend.device):
                    result = launch(where_to)
        except Exception as error:  # parts of it may be on their way: nobody can go on from there
            failure = backend.library.failure(error)
            if not isinstance(failure, DistError):
                failure = DistBackendError(f"{type(error).__name__}: {error}")
            backend.fail(failure)
            # A call that is ended because the engine gave up fails for that reason, and not for what NCCL says of it.
            backend.check()
            raise failure from error
        return result

    def _barrier(self, request: Request) -> Any:
        group, where = request.group, request.where
        timeout_s = group.timeout_s if request.timeout_s is None else request.timeout_s
        if request.collective.name == "monitored_barrier":
            try:
                self._backend.monitored_barrier(where, timeout_s)
                return None
            except BaseException as error:
                raise group.fail(error, where) from None
        call = Call(request.collective, where, group.rank(), group.size(), None, None)
        work = DeviceWork(where, None, waits_on_host=True)
        try:
            lane = self._backend.lane(where, None)
            with self._backend.cuda.Device(lane.device):
                if self._scratch is None:
                    self._scratch = cupy_module().zeros(1, "uint8")
        except BaseException as error:
            raise group.fail(error, where) from None
        plan = plans.Barrier(call)
        plan.facts = facts_of(call, group.name, group.label, timeout_s)
        self._launch(request, plan, self._scratch, self._scratch, None, timeout_s, (work,))
        if request.async_op:
            return work
        try:
            work.wait()
        except BaseException as error:
            raise group.fail(error, where) from None
        return None

    def _plan_of(self, call: Call) -> NcclPlan:
        name = call.collective.name if call.collective.staging is not None else call.collective.native
        if name in _REDUCTIONS or name in _COALESCED:
            return reduction_plan(call)
        if name == "all_gather":
            assert isinstance(call.recv, list)
            is_even = len({array.size for array in call.recv}) == 1
            return (plans.AllGatherList if is_even else plans.AllGatherVarying)(call)
        make = _PLANS.get(name)
        if make is None:
            raise DistBackendError(
                f"{call.where}: backend 'nccl' has one GPU for each rank, and no calls over several of them; start a"
                " rank for each GPU"
            )
        return make(call)

    def _apart(self, given: Any, taken: Any, group: Any, reduces: bool) -> Any:
        """Return what is sent, copied where what is received is written over it."""
        if not _near(each(given), each(taken)):
            return given
        if not must_copy(outlines(given), outlines(taken), group.rank(), group.size(), reduces):
            return given
        with self._backend.cuda.Device(int(each(given)[0].device.id)):  # a copy lies on the current device
            return [array.copy() for array in given] if isinstance(given, list) else given.copy()


class Scaled:
    """A reduction of arrays that are multiplied by this rank's factor first.

    Attributes:
        apart, facts: Those of the reduction.
    """

    def __init__(self, plan: Reducing | Gathered | Coalesced, factor: PremulSum) -> None:
        self._plan, self._factor = plan, factor
        self.apart, self.facts = plan.apart, plan.facts

    def launch(self, lane: Lane, send: Any, recv: Any) -> None:
        """Enqueue the call."""
        self._plan.launch_scaled(lane, send, recv, self._factor)


def _taken(value: Any, name: str, is_list: bool, written: bool) -> Any:
    return as_device_buffers(value, name, is_list, written=written)


def _shapes(buffers: Any) -> Any:
    if type(buffers) is list:
        return tuple([(array.dtype, array.shape) for array in buffers])
    return None if buffers is None else (buffers.dtype, buffers.shape)


def _near(gives: list[Any], takes: list[Any]) -> bool:
    """Return False where no input can share memory with an output; a look that costs little."""
    if not all(array.flags.c_contiguous for array in (*gives, *takes)):
        return True
    spans = [_span(gives), _span(takes)]
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def _span(arrays: list[Any]) -> tuple[int, int]:
    full = [(array.data.ptr, array.data.ptr + array.nbytes) for array in arrays if array.nbytes]
    return (min(low for low, _ in full), max(high for _, high in full)) if full else (0, 0)
