"""ProcessGroup: an ordered set of ranks, and the path of every call on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from copy import copy
from functools import partial
from sys import _getframe
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from meshdist import core
from meshdist.arrays.reduce_op import Op
from meshdist.backends.base import Backend, Plan
from meshdist.collectives.methods import CollectiveMethods
from meshdist.core import Record
from meshdist.errors import DistBackendError, DistError, DistNetworkError, DistTimeoutError
from meshdist.groups.checked_call import CheckedCall
from meshdist.groups.group_backends import GroupBackends
from meshdist.groups.membership import GroupHome, Membership, listed
from meshdist.groups.point_to_point import PointToPoint
from meshdist.runtime.call import CollectiveSpec, ShapeRule, Splits
from meshdist.runtime.departure import earlier_failure, gave_up
from meshdist.runtime.device_calls import DeviceCalls, Request
from meshdist.runtime.flight_recorder import clock, located, users
from meshdist.runtime.forgotten import never_waited_for
from meshdist.runtime.handover import Handover
from meshdist.runtime.hooks import CallHooks
from meshdist.runtime.job import Job
from meshdist.runtime.plan_cache import device_key, remember, simple_key
from meshdist.runtime.progress import JobQueue
from meshdist.runtime.waiting import Waitable
from meshdist.runtime.work import PlannedWork, Work, in_progress_thread
from meshdist.store.brief_requests import brief
from meshdist.system.deadline import Deadline
from meshdist.system.name_hints import NamesExplained, missing_attribute, naming_methods

# How long a rank may take to say in the store that it gives up, since a peer has ended or cannot be reached.
_LAST_WORDS_S = 1.5

# Besides the calls.
_FOR_USERS = (
    *("abort", "backend_name", "close", "device_id", "global_rank", "group_desc", "hosts", "label", "name"),
    *("pg_options", "rank", "ranks", "size"),
)

DESTROYED = "has been destroyed"  # what became of a closed group, unless it was closed for another reason


@naming_methods
class ProcessGroup(CollectiveMethods, Membership, metaclass=NamesExplained):
    """The ranks that a call runs over; created by `new_group`, by a mesh, or by `init_process_group` for the world.

    Creating a group is cheap: its backend is created at the first call. Every collective is a method, whose `src` and
    `dst` are ranks in the group.

    Attributes:
        ranks: The global ranks, in group order.
        name: The group's name, the same on all its ranks.
        label: The group's name in errors and logs: `group_desc` of `new_group`, or else `name`.
        backend_name: The name of the backend, or pairs of device type and name, as in "cpu:gloo,cuda:nccl".
        pg_options: The argument of `new_group`.
        device_id: The argument of `new_group`.

    Used as a context manager, the group is destroyed at the end of the block, as by `destroy_process_group`. If the
    block ends with an exception, the peers' calls that wait for this rank fail.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     if dist.get_rank() in (1, 3):
        ...         with dist.new_group([1, 3]) as odd:
        ...             return int(odd.all_reduce(np.array(dist.get_rank())))
        >>> dist.run(main, 4)
        [None, 4, None, 4]
    """

    pg_options: Any = None
    device_id: Any = None
    # Whether the ranks' arrays may have different shapes with the same number of elements, as in torch.
    takes_any_shapes = False

    def __init__(
        self, world: GroupHome, ranks: tuple[int, ...], name: str, label: str, backend: str, timeout_s: float
    ) -> None:
        super().__init__(ranks, name, label, world.rank)
        self.backend_name = backend
        self.timeout_s = timeout_s
        self._world = world
        self.plans: dict[Any, Any] = {}  # by plan_key: Plans, and planned calls on GPU arrays
        self._device_array: type | None = None  # the type of the arrays of the latter
        self.compares_shapes = False  # the ranks compare the shapes of all arrays, as at debug level DETAIL
        self._queue = JobQueue(world.progress)
        self._queued = self._queue.jobs
        self.recorder = world.recorder
        self._keep = self.recorder.keep
        self._backends = GroupBackends(backend, lambda name: world.make_backend(self, name))
        self._broken: DistError | None = None
        self._handover = Handover()  # of the errors of its calls
        self._closed: str | None = None
        self.messages = PointToPoint(self, world.progress)
        # The number of calls that this rank has made on the group, and their states.
        self.calls = core.Calls(
            self._queue, self.messages.deferral, self.messages.announcing, self._keep, self._raise_failed, self._job_of
        )
        self.hooks = CallHooks(self)  # observers, recorders and redirections of the calls

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.label!r}: ranks {listed(self.ranks)}, backend {self.backend_name}>"

    def __dir__(self) -> list[str]:
        """Return the names that are for users; the others are for this package."""
        calls = (name for name in vars(CollectiveMethods) if not name.startswith("_") and name != "collective_group")
        return sorted({*dir(object), *calls, *_FOR_USERS})

    if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

        def __getattr__(self, name: str) -> object:
            raise missing_attribute(self, name)

    def __enter__(self) -> ProcessGroup:
        """Return this group, which is destroyed when the block ends."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroy the group, unless it was destroyed in the block."""
        self._world.end_block(self, error)

    @property
    def num_calls(self) -> int:
        """How many collectives this rank has called on the group."""
        return self.calls.num_calls

    @num_calls.setter
    def num_calls(self, count: int) -> None:
        self.calls.num_calls = count

    @property
    def collective_group(self) -> ProcessGroup:
        """This group, over which the methods run."""
        return self

    def hosts(self) -> list[str]:
        """Return an id of the host of each rank, in group order; equal for ranks of one host."""
        return self._world.hosts(self.ranks)

    def submit(
        self,
        collective: CollectiveSpec,
        send: Any,
        recv: Any,
        op: Op | None = None,
        root: int | None = None,
        async_op: bool = False,
        splits: Splits | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Carry out one call of `collective`: all collectives, sync and async, flat functions and methods, come here.

        If there is a plan for the call's signature, it runs at once. Calls without a plan, and calls on other objects
        than plain arrays, go through `_submit_prepared`.
        """
        if type(recv) is self._device_array and type(send) is self._device_array and timeout_s is None:
            try:
                planned = self.plans.get(device_key(collective, send, recv, op, root, splits))
            except TypeError:  # the op is not hashable; `_submit_prepared` refuses it
                planned = None
            if planned is not None and (result := planned(send, recv, async_op)) is not NotImplemented:
                return result
        plan: Plan | None
        try:
            if send is recv and type(recv) is ndarray:
                plan = self.plans.get((collective, recv.dtype, recv.shape, op, root))
                if plan is not None and not recv.flags.carray:
                    plan = None
            elif type(recv) is ndarray and type(send) is ndarray:
                plan = self.plans.get((collective, recv.dtype, recv.shape, send.dtype, send.shape, op, root, splits))
                if plan is not None and not (
                    recv.flags.carray
                    and send.flags.c_contiguous
                    and not (plan.apart and np.may_share_memory(send, recv))
                ):
                    plan = None
            else:
                plan = self.plans.get(simple_key(collective, send, recv, op, root, splits))
                if plan is not None and recv is not None and plan.known_apart.may_overlap(send, recv):
                    plan = None
        except TypeError:  # the op is not hashable; `_submit_prepared` refuses it
            plan = None
        if plan is None or timeout_s is not None:
            return self._submit_prepared(collective, send, recv, op, root, async_op, splits, timeout_s)
        # The same record as `recorder.begin` makes. The callers are the collective and usually the user's code: if it
        # is the code of last time, the search by `users` is not needed.
        try:
            frame = _getframe(2)
        except ValueError:  # the collective is the thread's target
            frame = _getframe(1)
        code = frame.f_code
        if code is not plan.caller:
            frame = users(frame)
            plan.caller = code = frame.f_code
        calls = self.calls
        calls.num_calls = sequence = calls.num_calls + 1
        now = clock()
        record = Record(plan.facts, sequence, now, now, code, frame.f_lasti)
        self._keep(record)
        if async_op or self._queued:
            if async_op and calls.note is not None and isinstance(plan.runner, core.Step) and not plan.go_on:
                calls.note(plan.runner, plan.facts, plan.error_prefix, send, recv, plan.apart, plan)
            return self._enqueue(plan.error_prefix, partial(self._plan_steps, plan, send, recv), recv, async_op, record)
        try:
            plan.run(send, recv)
        except BaseException as error:
            raise self.fail(error, plan.error_prefix, record) from None
        record.completed = clock()
        if calls.note is not None:
            calls.note(plan.runner, plan.facts, plan.error_prefix, send, recv, plan.apart, None, plan.go_on)
        return recv

    def remember_call(self, key: Hashable, device_array: type, planned: Callable[[Any, Any, bool], Any]) -> None:
        """Keep a call on GPU arrays, of the type `device_array`, that needs no checks; its key is a `device_key`.

        `planned(send, recv, async_op)` makes it, or returns NotImplemented.
        """
        self._device_array = device_array
        remember(self.plans, key, planned)

    def submit_unobserved(self, *args: Any) -> Any:
        """`submit` without hooks, for a part of a call that the hooks have seen already."""
        return type(self).submit(self, *args)

    def relabel(self, label: str) -> None:
        """Change the group's name in errors and logs."""
        super().relabel(label)
        self._forget_plans()

    def begin_close(self) -> None:
        """Tell the other ranks that this one leaves, where closing may wait for them."""
        self._backends.begin_close()

    def close(self) -> None:
        """Wait for the async calls, and release the resources of the group; later calls raise a ValueError.

        Receives are waited for only a few seconds, since their messages may never be sent.
        """
        self.close_as(DESTROYED)

    def close_as(self, what: str) -> None:
        """Close the group; later calls raise with `what` became of it."""
        self._world.progress.drain(self._queue)
        self.messages.drain()
        for lost in self._lost() if what == DESTROYED else ():
            self._world.log.warning("group %r was destroyed, and %s", self.label, lost)
        self._forget_plans()
        self._backends.close()
        self._closed = self._closed or what

    def _lost(self) -> list[str]:
        """Return in words what no call has told: calls that disagree, messages that have arrived, works or errors."""
        if not self.is_broken:
            unasked = never_waited_for(self.calls, self._world.progress)
            found = [self._backends.disagreement(), self._backends.left_over(self.ranks), unasked]
        else:
            found = ["" if self._broken is None else self._handover.lost(self._broken, self._world.rank)]
        return list(filter(None, found))

    def disown(self, what: str) -> None:
        """In a forked child: make calls raise with `what` became of the group."""
        self._closed = what
        self.messages.disown(DistError(what))
        self._forget_plans()

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one gives up, and why; later calls raise."""
        self.give_up(DistBackendError(reason))

    def give_up(self, error: DistError) -> None:
        """Abort because of `error`."""
        self._world.announce_departure(self, gave_up(error))
        self._handover = Handover(is_aborted=True)  # what failed before does not matter any more
        self._break(error)

    @property
    def is_broken(self) -> bool:
        """Whether later calls raise, since a call has failed or the group was closed."""
        return self._broken is not None or self._closed is not None

    @property
    def has_backend(self) -> bool:
        """Whether a backend was made; it has a connection to the peers."""
        return self._backends.any_made

    def has_left(self, rank: int) -> bool:
        """Return whether a global rank of the group has left it, as far as the store tells."""
        return self._backends.has_left(self.ranks.index(rank))

    @property
    def outstanding(self) -> int:
        """The number of async calls that are not done."""
        return len(self._queued) + self.messages.outstanding

    def check_usable(self, error_prefix: str) -> None:
        """Raise if the group is no longer valid.

        Raises:
            ValueError: It was closed.
            DistBackendError: An earlier call on it failed; the message names the error.
        """
        if self._closed is not None:
            advice = "; create another with new_group() or init_process_group()" if self._closed == DESTROYED else ""
            raise ValueError(f"{error_prefix}: group {self.label!r} {self._closed}{advice}")
        if self._broken is not None:
            error = earlier_failure(self._broken, error_prefix, with_report=not self._handover.has_given)
            self._handover.add(error, is_raised=not in_progress_thread())
            raise error

    def carries(self, device: str) -> bool:
        """Return whether a backend of the group carries arrays on a device type, "cpu" or "cuda"."""
        return self._backends.carries(device)

    def least_strided_bytes(self, array: Any) -> int:
        """Return from which size on blocks such as `array` are sent as a list of parts with strides; see `Backend`."""
        return self._backends.for_buffers((array,)).least_strided_bytes

    def reduces_apart(self, array: Any) -> bool:
        """Return whether an all_reduce of `array` may write to another array; see `Backend`."""
        backend = self.named(self.error_prefix("all_reduce"), self._backends.for_buffers, (array,))
        least_bytes = backend.least_apart_bytes
        return least_bytes is not None and array.nbytes >= least_bytes

    def device_calls(self, of: str) -> DeviceCalls | None:
        """Return the DeviceCalls of the group; None if it takes no arrays on a GPU.

        Raises:
            DistBackendError: The backend for GPUs cannot be used here.
        """
        backend = self.named(self.error_prefix(of), self._backends.for_device, "cuda")
        return None if backend is None else backend.device_calls

    def usable_backend(self, error_prefix: str, *buffers: Any) -> Backend:
        """Return the backend for these arrays, or lists of them; raise if this rank cannot use the group."""
        self.check_usable(error_prefix)
        if self._rank < 0:
            raise ValueError(
                f"{error_prefix}: global rank {self._world.rank} is not in this group, ranks {listed(self.ranks)}"
            )
        return self.named(error_prefix, self._backends.for_buffers, buffers)

    def _submit_prepared(
        self,
        collective: CollectiveSpec,
        send: Any,
        recv: Any,
        op: Op | None,
        root: int | None,
        async_op: bool,
        splits: Splits | None,
        timeout_s: float | None,
    ) -> Any:
        error_prefix = self.error_prefix(collective.name)
        backend = self.usable_backend(error_prefix, send, recv)
        if backend.device_calls is not None:
            modes = (async_op, splits, timeout_s, self._shape_rule, self.calls.words)
            return backend.device_calls.submit(Request(self, error_prefix, collective, send, recv, op, root, *modes))
        made = CheckedCall(self, backend, collective, send, recv, op, root, splits, self._shape_rule)
        self.num_calls += 1
        queued = async_op or bool(self._queued)
        record = self.recorder.begin(made.facts, self.num_calls, started=not queued)
        if collective.meets:
            self._meet(backend, error_prefix, self.timeout_s if timeout_s is None else timeout_s, record)
        if queued:
            return self._enqueue(error_prefix, made.steps, recv, async_op, record, timeout_s)
        try:
            if made.plan is not None and timeout_s is None:
                made.run(made.plan)
            else:
                deadline = None if timeout_s is None else Deadline(timeout_s)
                for waitable in made.steps():
                    backend.wait(waitable, error_prefix, deadline)
        except BaseException as error:
            raise self.fail(error, error_prefix, record) from None
        self.recorder.end(record)
        if made.plan is None:
            made.tell_core()
        return recv

    def _meet(self, backend: Backend, error_prefix: str, timeout_s: float, record: Record) -> None:
        """Meet the other ranks before a call begins; after a timeout, it is as if this rank had not called."""
        try:
            backend.meet(error_prefix, timeout_s, is_first=self.num_calls == 1)
        except DistTimeoutError as error:
            self.num_calls -= 1
            self.recorder.end(record, error)
            self._world.note_fault(error)
            raise
        except BaseException as error:
            raise self.fail(error, error_prefix, record) from None

    def _enqueue(
        self, error_prefix: str, steps: Any, recv: Any, async_op: bool, record: Record, timeout_s: float | None = None
    ) -> Any:
        record.started = 0
        work = Work(error_prefix, recv)
        work.record = record
        job = Job(steps, work, self.timeout_s if timeout_s is None else timeout_s, error_prefix, self.fail, record)
        try:
            self._world.progress.submit(self._queue, job)
        except DistError as error:
            raise self.fail(error, error_prefix, record) from None
        if async_op and (record.facts.sent or record.facts.received):  # without arrays, none may be used too early
            work._expect_wait(record, self.calls.forgotten)
        try:
            return work if async_op else work.result()
        except KeyboardInterrupt as error:  # the caller no longer waits for the result
            raise self.fail(error, error_prefix) from None

    def _plan_steps(self, plan: Plan, send: Any, recv: Any) -> Iterator[Waitable]:
        if self.is_broken:
            self.check_usable(plan.error_prefix)
        return plan.steps(send, recv)

    def _job_of(self, work: PlannedWork) -> Job:
        """Return the Job of a call that the core has begun."""
        plan, sent, received = work.call()
        if work.has_begun:
            steps = partial(plan.rest, sent, received, work.word, work.phase)
        else:
            steps = partial(self._plan_steps, plan, sent, received)
        return Job(steps, work, self.timeout_s, plan.error_prefix, self.fail, work.record, error=work._error)

    def compare_shapes(self, wanted: bool) -> None:
        """Compare the shapes of the ranks' arrays in all following calls, or in those that compare them by default."""
        self.compares_shapes = wanted
        self._forget_plans()  # they have their comparison built in

    @property
    def _shape_rule(self) -> ShapeRule:
        if self.compares_shapes:
            return ShapeRule.EQUAL_SHAPE
        return ShapeRule.ANY_SHAPE if self.takes_any_shapes else ShapeRule.BY_COLLECTIVE

    def check_precondition(self, precondition: Callable[[], str | None]) -> None:
        """Make the next call fail if `precondition` returns what is broken, and not None."""
        self._backends.check_precondition(precondition)
        self._forget_plans()  # a call that has a plan does not look for its backend

    def fail(self, error: BaseException, error_prefix: str, record: Record | None = None) -> BaseException:
        """Break the group after `error` in the call of `record`, if there is one; return the error to raise."""
        # After a call that ended half way the ranks are out of step, so the group is no longer valid.
        if isinstance(error, KeyboardInterrupt):
            self._world.note_interrupt()
            error.__traceback__ = None  # the user needs the frames of the call, not those of the wait
        error, cause = located(error, error_prefix, record)
        if record is not None:
            self.recorder.end(record, cause)
        self._handover.add(error, is_raised=not in_progress_thread())
        # After the end of a peer, the store may be cut off as well.
        with brief(_LAST_WORDS_S) if cause.peer_failed or isinstance(cause, DistNetworkError) else nullcontext():
            self._break(cause)
            self._world.note_fault(cause)
        return error

    def _break(self, cause: DistError) -> None:
        # A copy, since the traceback of the exception would keep the shared memory alive.
        self._broken = self._broken or copy(cause)
        self._forget_plans()
        self._backends.give_up(self._broken)

    def _forget_plans(self) -> None:
        # Replaced, not emptied: an async call that has started keeps its plan in the dict of its time.
        self.plans = {}
        self.hooks.compared = {}
        self.messages.forget_requests()
        self.calls.forget()

    def _raise_failed(self, error: BaseException, error_prefix: str, record: Record | None) -> None:
        raise self.fail(error, error_prefix, record) from None
