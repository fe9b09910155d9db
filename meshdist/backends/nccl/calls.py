"""NcclCalls: carries out a group's calls on GPU arrays by NCCL.

Only a barrier waits for the device. A call is checked as on the CPU, enqueued by the calling thread, and complete when
the device has executed it. The ranks' calls are not compared, since that would have to wait for them.

A call of one contiguous array, or of one and one, is checked the first time. Then its group keeps a `PlannedCall` for
it, and calls with the same signature go to that directly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from meshdist.arrays.device import as_device_array, cupy_module, device_of, outlines
from meshdist.arrays.overlap import must_copy
from meshdist.arrays.reduce_op import PremulSum
from meshdist.backends.nccl import plans
from meshdist.backends.nccl.comm_stream import CommStream, LaunchStream
from meshdist.backends.nccl.launch_gate import LaunchGate
from meshdist.backends.nccl.library import Library
from meshdist.backends.nccl.multigpu_plans import OVER_GPUS, OverGpus, over_gpus
from meshdist.backends.nccl.p2p import Batch, Message, Pair
from meshdist.backends.nccl.pg_options import waits_on_host
from meshdist.backends.nccl.plans import NcclPlan
from meshdist.backends.nccl.reductions import Coalesced, Gathered, Reducing, reduction_plan
from meshdist.backends.nccl.works import DeviceWork
from meshdist.backends.p2p.eager_messages import eager_bytes
from meshdist.core import Record
from meshdist.errors import DistBackendError, DistError, DistTimeoutError
from meshdist.runtime.call import Call, each
from meshdist.runtime.device_calls import DeviceCalls, Parcel, Request
from meshdist.runtime.flight_recorder import clock, facts_of, users
from meshdist.runtime.plan_cache import device_key
from meshdist.runtime.work import Work

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group

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
CARRIED = frozenset((*_REDUCTIONS, *_COALESCED, *_PLANS, "all_gather", *OVER_GPUS))


class CallsBackend(Protocol):
    """What NcclCalls needs of the group's backend; NcclBackend documents the methods."""

    device: int | None
    library: Library
    cuda: Any
    gate: LaunchGate
    error: DistError | None

    def check(self) -> None: ...
    def admit(self, number: int, error_prefix: str, timeout_s: float) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def comm_stream(self, error_prefix: str, device: int | None) -> CommStream: ...
    def pair(self, peer: int, error_prefix: str, device: int) -> Pair: ...
    def meet(self, error_prefix: str, timeout_s: float, is_first: bool) -> None: ...
    def compare(self, call: Call, error_prefix: str) -> None: ...


class NcclCalls(DeviceCalls):
    """The calls of one group."""

    has_tags = False

    def __init__(self, backend: CallsBackend) -> None:
        super().__init__()
        self._backend = backend
        self._array = cupy_module().ndarray
        self._scratch: Any = None
        self._of_graphs: list[Any] = []  # copies that operations of graphs send
        self._eager_bytes = eager_bytes()
        self._batch: Batch | None = None
        self._waits_on_host = waits_on_host()

    @property
    def device(self) -> int | None:  # type: ignore[override]
        return self._backend.device

    def submit(self, request: Request) -> Any:
        group, collective, error_prefix = request.group, request.collective, request.error_prefix
        send, recv = request.send, request.recv
        if send is None and recv is None and collective.native == "barrier":
            return self._barrier(request)
        given, taken = self.arrays(request)
        in_place = given is taken
        device: int | None = self._rank_gpu(given, taken) if collective.name in OVER_GPUS else None
        if device is None:
            device = group.named(error_prefix, device_of, [*each(given), *([] if in_place else each(taken))])
        plan: Any = self.plan(request, given, taken, lambda call: self._made(request, call))
        factor = request.op if isinstance(request.op, PremulSum) else None
        if factor is not None:
            for array in each(given):
                group.named(error_prefix, factor.check, array, collective.names[0])
            assert isinstance(plan, (Reducing, Gathered, OverGpus))
            plan = Scaled(plan, factor)
        elif type(recv) is type(send) is self._array and not (request.compares or self._waits_on_host):
            key = device_key(collective, send, recv, request.op, request.root, request.splits)
            group.remember_call(key, self._array, PlannedCall(self, self._backend, plan, group, error_prefix))
        if plan.facts.label != group.label:  # the group was relabelled
            plan.facts = plan.facts.relabelled(group.label)
        if plan.apart and not in_place and given is not None and taken is not None:
            given = self._apart(given, taken, group, request.op is not None)
        return self._carry_out(request, plan, given, taken, device)

    def _rank_gpu(self, given: Any, taken: Any) -> int | None:
        """Return the GPU of this rank: the group's, or that of the first array of a list; None if the list is empty."""
        if self._backend.device is not None:
            return self._backend.device
        arrays = taken if isinstance(taken, list) else given
        return int(arrays[0].device.id) if arrays else None

    def _made(self, request: Request, call: Call) -> NcclPlan | OverGpus:
        group = request.group
        plan = self._plan_of(call)
        plan.facts = facts_of(call, group.name, group.label, group.timeout_s)
        self._compare(request, call)
        return plan

    def _compare(self, request: Request, call: Call) -> None:
        """Compare a call with those of the other ranks, if they compare their calls."""
        if request.compares:
            try:
                self._backend.compare(call, request.error_prefix)
            except BaseException as error:
                raise request.group.fail(error, request.error_prefix) from None

    def _carry_out(
        self, request: Request, plan: NcclPlan | OverGpus | Scaled, given: Any, taken: Any, device: int | None
    ) -> Any:
        timeout_s = request.group.timeout_s if request.timeout_s is None else request.timeout_s
        if request.async_op or self._waits_on_host:
            work = DeviceWork(request.error_prefix, request.recv, waits_on_host=self._waits_on_host)
            self._launch(request, plan, given, taken, device, timeout_s, (work,))
            return work if request.async_op else self._waited(request, work)
        self._launch(request, plan, given, taken, device, timeout_s, (), inline=True)
        return request.recv

    def send(self, parcel: Parcel) -> None:
        array = parcel.group.named(parcel.error_prefix, lambda: as_device_array(parcel.tensor, "tensor"))
        if array.nbytes > self._eager_bytes:
            self.isend(parcel).wait()
            return
        # A copy, on the caller's stream, which then goes on: the CommStream keeps the copy until it is sent.
        with self._backend.cuda.Device(int(array.device.id)):
            buffered = array.copy()
        self.isend(parcel._replace(tensor=buffered))

    def recv(self, parcel: Parcel) -> int:
        self.irecv(parcel).wait()
        assert parcel.peer is not None
        return parcel.peer

    def isend(self, parcel: Parcel) -> Work:
        return self._message(parcel, is_send=True)

    def irecv(self, parcel: Parcel) -> Work:
        if parcel.peer is None:
            raise ValueError(f"{parcel.error_prefix}: NCCL receives from a given rank only, not from any; pass src")
        return self._message(parcel, is_send=False)

    def connect(self, error_prefix: str) -> None:
        self._backend.comm_stream(error_prefix, None)

    def begin_batch(self) -> None:
        self._batch = Batch()

    def end_batch(self, group: Group, error_prefix: str | None) -> None:
        batch, self._batch = self._batch, None
        if batch is None or not batch.messages:
            return
        if error_prefix is None:
            for message in batch.messages:
                message.work.complete(DistError("it was not posted, since another message of its batch was refused"))
            return
        device = group.named(error_prefix, device_of, [message.array for message in batch.messages])
        works = [message.work for message in batch.messages]
        self._post(
            group,
            error_prefix,
            lambda: self._backend.comm_stream(error_prefix, device),
            lambda comm_stream: comm_stream.launch(
                batch.launch, batch.messages, None, error_prefix, group.timeout_s, works, batch.records()
            ),
        )

    def _message(self, parcel: Parcel, *, is_send: bool) -> Work:
        group, error_prefix = parcel.group, parcel.error_prefix
        if parcel.tag:
            raise ValueError(
                f"{error_prefix}: NCCL has no tags, messages between two ranks keep their order; got tag {parcel.tag}"
            )
        assert parcel.peer is not None
        array = group.named(error_prefix, lambda: as_device_array(parcel.tensor, "tensor", written=not is_send))
        source = None if is_send else group.global_rank(parcel.peer)
        tensor = None if is_send else parcel.tensor
        work = DeviceWork(error_prefix, tensor, waits_on_host=self._waits_on_host, source=source)
        record = group.messages.begin_record(parcel.of, array, parcel.peer, parcel.tag, sends=is_send)
        message = Message(array, parcel.peer, work, record, is_send=is_send)
        if self._batch is not None:
            self._batch.messages.append(message)
            return work
        # The CommStream of a direction has two ranks: the sender is rank 0.
        message.peer = int(is_send)

        def find() -> Pair:
            pair = self._backend.pair(parcel.peer or 0, error_prefix, int(array.device.id))
            pair.check_stream(error_prefix)
            return pair

        self._post(
            group,
            error_prefix,
            find,
            lambda pair: pair.post(Batch([message]), error_prefix, group.timeout_s, (work,), is_send=is_send),
        )
        return work

    def _post(self, group: Group, error_prefix: str, find: Callable[[], Any], post: Callable[[Any], object]) -> None:
        try:
            self._run(find(), post)
        except ValueError:  # an array on the wrong GPU; nothing was sent
            raise
        except BaseException as error:
            raise group.fail(error, error_prefix) from None

    def _launch(
        self,
        request: Request,
        plan: Any,
        send: Any,
        recv: Any,
        device: int | None,
        timeout_s: float,
        works: Any,
        *,
        inline: bool = False,
    ) -> None:
        group, error_prefix = request.group, request.error_prefix
        group.num_calls += 1
        record = group.recorder.begin(plan.facts, group.num_calls)
        try:
            comm_stream = self._backend.comm_stream(error_prefix, device)
            comm_stream.num_launched = number = comm_stream.num_launched + 1
            if self._backend.gate.num_connecting:
                self._backend.admit(number, error_prefix, timeout_s)
            self._run(
                comm_stream,
                lambda comm_stream: comm_stream.launch(
                    plan.launch, send, recv, error_prefix, timeout_s, works, (record,), inline=inline, number=number
                ),
            )
        except ValueError as error:  # an array on the wrong GPU; nothing was sent
            group.recorder.end(record, error)
            raise
        except BaseException as error:
            raise group.fail(error, error_prefix, record) from None

    def _run(self, where_to: Any, launch: Callable[[Any], Any]) -> Any:
        """Call `launch` with a CommStream or a Pair, with its GPU as the current device."""
        backend = self._backend
        try:
            if backend.cuda.runtime.getDevice() == backend.device:
                result = launch(where_to)
            else:
                with backend.cuda.Device(backend.device):
                    result = launch(where_to)
        except Exception as error:
            raise self.unusable(error) from error
        return result

    def unusable(self, error: Exception) -> BaseException:
        """Give up after an error of a launch: parts of the operation may be enqueued; return the error to raise."""
        backend = self._backend
        failure = backend.library.failure(error)
        if not isinstance(failure, DistError):
            failure = DistBackendError(f"{type(error).__name__}: {error}")
        backend.fail(failure)
        # If the backend gave up during the call, report that reason and not NCCL's error about the abort. A copy:
        # callers add their own prefix.
        return failure if backend.error is None else copy(backend.error)

    def _barrier(self, request: Request) -> Any:
        group, error_prefix = request.group, request.error_prefix
        timeout_s = group.timeout_s if request.timeout_s is None else request.timeout_s
        if request.collective.name == "monitored_barrier":
            try:
                self._backend.meet(error_prefix, timeout_s, is_first=group.num_calls == 0)
                return None
            except DistTimeoutError:
                raise
            except BaseException as error:
                raise group.fail(error, error_prefix) from None
        call = Call(request.collective, error_prefix, group.rank(), group.size(), None, None)
        self._compare(request, call)
        work = DeviceWork(error_prefix, None, waits_on_host=True)
        try:
            comm_stream = self._backend.comm_stream(error_prefix, None)
            with self._backend.cuda.Device(comm_stream.device):
                if self._scratch is None:
                    self._scratch = cupy_module().zeros(1, "uint8")
        except BaseException as error:
            raise group.fail(error, error_prefix) from None
        plan = plans.Barrier(call)
        plan.facts = facts_of(call, group.name, group.label, timeout_s)
        self._launch(request, plan, self._scratch, self._scratch, None, timeout_s, (work,))
        return work if request.async_op else self._waited(request, work)

    def _waited(self, request: Request, work: DeviceWork) -> Any:
        try:
            work.wait()
        except BaseException as error:
            raise request.group.fail(error, request.error_prefix) from None
        return request.recv

    def _plan_of(self, call: Call) -> NcclPlan | OverGpus:
        return over_gpus(call, self._plan_on_one) if call.collective.name in OVER_GPUS else self._plan_on_one(call)

    def _plan_on_one(self, call: Call) -> NcclPlan:
        name = call.collective.name if call.collective.composition is not None else call.collective.native
        if name in _REDUCTIONS or name in _COALESCED:
            return reduction_plan(call)
        if name == "all_gather":
            assert isinstance(call.recv, list)
            is_even = len({array.size for array in call.recv}) == 1
            return (plans.AllGatherList if is_even else plans.AllGatherVarying)(call)
        make = _PLANS.get(name)
        if make is None:
            raise DistBackendError(
                f"{call.error_prefix}: NCCL does not have {name}; call it on a group that copies the arrays through the"
                " CPU: new_group(backend='cuda:gloo')"
            )
        return make(call)

    def _apart(self, given: Any, taken: Any, group: Any, reduces: bool) -> Any:
        """Return what is sent, copied if receiving would overwrite it."""
        if not _near(each(given), each(taken)):
            return given
        if not must_copy(outlines(given), outlines(taken), group.rank(), group.size(), reduces):
            return given
        with self._backend.cuda.Device(int(each(given)[0].device.id)):  # the copy is allocated on the current device
            copies = [array.copy() for array in given] if isinstance(given, list) else given.copy()
            cuda = self._backend.cuda
            if cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr):
                self._of_graphs.append(copies)  # the launches of the graph use it
            return copies


class PlannedCall:
    """A call of a signature that was checked before, of contiguous arrays that lie apart, on the rank's GPU."""

    __slots__ = ("_backend", "_caller", "_calls", "_comm_stream", "_device", "_enqueue", "_get_device", "_of", "_plan")

    def __init__(self, calls: NcclCalls, backend: CallsBackend, plan: Any, group: Group, error_prefix: str) -> None:
        self._calls, self._backend, self._plan = calls, backend, plan
        self._enqueue = plan.launch if plan.computes else plan.go  # the arrays are contiguous
        self._of = group, error_prefix
        self._comm_stream: CommStream | None = None
        self._device: int | None = None
        self._get_device = backend.cuda.runtime.getDevice
        self._caller: CodeType | None = None

    def __call__(self, send: Any, recv: Any, async_op: bool) -> Any:
        """Launch the call, and return what it returns; NotImplemented if it has to be checked again."""
        comm_stream, device = self._comm_stream, self._device
        if comm_stream is None:
            if self._backend.device is None or self._backend.error is not None:
                return NotImplemented
            self._device = device = self._backend.device
            self._comm_stream = comm_stream = self._backend.comm_stream(self._of[1], device)
        if self._get_device() != device or recv.data.device_id != device or not recv.flags.c_contiguous:
            return NotImplemented
        if send is not recv and (
            send.data.device_id != device or not send.flags.c_contiguous or (self._plan.apart and _may_meet(send, recv))
        ):
            return NotImplemented
        group, error_prefix = self._of
        # The record that `recorder.begin` makes; the code of the user's call is most often that of last time.
        try:
            frame = sys._getframe(3)
        except ValueError:  # the collective is the thread's target
            frame = sys._getframe(2)
        if frame.f_code is not self._caller:
            frame = users(frame)
            self._caller = frame.f_code
        group.num_calls = number = group.num_calls + 1
        now = clock()
        record = Record(self._plan.facts, number, now, now, frame.f_code, frame.f_lasti)
        group.recorder.keep(record)
        timeout_s = group.timeout_s
        work = DeviceWork(error_prefix, recv) if async_op else None
        try:
            comm_stream.num_launched = place = comm_stream.num_launched + 1
            if self._backend.gate.num_connecting:
                self._backend.admit(place, error_prefix, timeout_s)
            works = () if work is None else (work,)
            comm_stream.launch(
                self._enqueue,
                send,
                recv,
                error_prefix,
                timeout_s,
                works,
                (record,),
                inline=work is None,
                number=place,
            )
        except BaseException as error:
            failure = self._calls.unusable(error) if isinstance(error, Exception) else error
            raise group.fail(failure, error_prefix, record) from None
        return recv if work is None else work


def _may_meet(send: Any, recv: Any) -> bool:
    begin, other = send.data.ptr, recv.data.ptr
    return bool(begin < other + recv.nbytes and other < begin + send.nbytes)


class Scaled:
    """A reduction of arrays that are multiplied by this rank's factor first.

    Attributes:
        apart, facts: Those of the reduction.
    """

    def __init__(self, plan: Reducing | Gathered | Coalesced | OverGpus, factor: PremulSum) -> None:
        self._plan, self._factor = plan, factor
        self.apart, self.facts = plan.apart, plan.facts

    def launch(self, on: LaunchStream, send: Any, recv: Any) -> None:
        self._plan.launch_scaled(on, send, recv, self._factor)


def _near(gives: list[Any], takes: list[Any]) -> bool:
    """Return False where no input can share memory with an output; a look that costs little."""
    if not all(array.flags.c_contiguous for array in (*gives, *takes)):
        return True
    spans = [_span(gives), _span(takes)]
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def _span(arrays: list[Any]) -> tuple[int, int]:
    full = [(array.data.ptr, array.data.ptr + array.nbytes) for array in arrays if array.nbytes]
    return (min(low for low, _ in full), max(high for _, high in full)) if full else (0, 0)
