"""ProcessGroup: an ordered set of ranks, and the path of every call on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from sys import _getframe
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from meshdist import buffers
from meshdist.arrays import as_buffers, check_apart
from meshdist.backends.base import Backend, Plan
from meshdist.call import Call, Splits
from meshdist.call_number import located
from meshdist.collectives.definition import Collective
from meshdist.collectives.methods import CollectiveMethods
from meshdist.deadline import Deadline
from meshdist.debug.flight_recorder import Record, clock, facts_of, users
from meshdist.detour import Detour
from meshdist.device_calls import DeviceCalls, Request
from meshdist.engines import Engines
from meshdist.errors import DistBackendError, DistError
from meshdist.farewell import gave_up
from meshdist.group_names import listed
from meshdist.membership import Membership
from meshdist.messages import Messages
from meshdist.plan_key import each, plan_key, remember, simple_key
from meshdist.progress import Job, JobQueue
from meshdist.reduce_op import Op, PremulSum, as_reduce_op
from meshdist.waiting import Waitable
from meshdist.work import Work

if TYPE_CHECKING:
    from meshdist.world import World

DESTROYED = "has been destroyed"  # a group that nobody says more about


class ProcessGroup(CollectiveMethods, Membership):
    """The ranks that a call runs over; made by `new_group`, by a mesh, or by `init_process_group` for the world.

    Making one costs nothing: the backend comes with the first call. Every collective is a method, with the ranks of
    the group as `src` and `dst`.

    Attributes:
        ranks: The global ranks, in group order.
        name: The group's name, the same on all its ranks.
        label: What messages call it: `group_desc` of `new_group`, the name where there is none.
        messages: Sends and receives over the group.
        num_calls: How many collectives this rank has called on it.
        detour: Leads calls elsewhere, or past those who watch them.
        backend_name: Its backends, in the spelling of `backend_name`.
        pg_options, device_id: What `new_group` was told of the backend and the device.

    As a context manager it is destroyed at the end of the block, as by `destroy_process_group`. Where the block ends
    with an exception the other ranks are told, so that none waits for this one.

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

    def __init__(
        self, world: World, ranks: tuple[int, ...], name: str, label: str, backend: str, timeout_s: float
    ) -> None:
        super().__init__(ranks, name, label, world.rank)
        self.backend_name = backend
        self.timeout_s = timeout_s
        self._world = world
        self._plans: dict[Any, Plan] = {}
        self._compares_shapes = False
        self._queue = JobQueue(world.progress)
        self._queued = self._queue.jobs
        self.recorder = world.recorder
        self._keep = self.recorder.keep
        self.num_calls = 0
        self._engines = Engines(backend, lambda name: world.make_engine(self, name))
        self._broken: DistError | None = None
        self._closed: str | None = None
        self.messages = Messages(self, world.progress)
        self.detour = Detour(self)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.label!r}: ranks {listed(self.ranks)}, backend {self.backend_name}>"

    if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

        def __getattr__(self, name: str) -> object:
            if name.startswith("_"):
                raise AttributeError(f"ProcessGroup has no attribute {name!r}")
            from meshdist.absent import no_attribute

            raise no_attribute(self, "ProcessGroup.", "ProcessGroup", name)

    def __enter__(self) -> ProcessGroup:
        """Return this group, which is destroyed when the block ends."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroy the group, if it has not been meanwhile."""
        self._world.end_block(self, error)

    @property
    def collective_group(self) -> ProcessGroup:
        """This group: the methods run over it."""
        return self

    def hosts(self) -> list[str]:
        """Return what tells the hosts of the ranks apart, in group order; ranks of one host have the same."""
        return self._world.hosts(self.ranks)

    def submit(
        self,
        collective: Collective[..., Any],
        send: Any,
        recv: Any,
        op: Op | None = None,
        root: int | None = None,
        async_op: bool = False,
        splits: Splits | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Carry out one call of `collective`: the way of every collective, sync or async, flat or as a method.

        A call whose signature has a plan runs it at once. What is not a plain array, and what has no plan yet, takes
        the longer way through `_submit_prepared`.
        """
        plan: Plan | None
        try:
            if send is recv and type(recv) is ndarray:
                plan = self._plans.get((collective, recv.dtype, recv.shape, op, root))
                if plan is not None and not recv.flags.carray:
                    plan = None
            elif type(recv) is ndarray and type(send) is ndarray:
                plan = self._plans.get((collective, recv.dtype, recv.shape, send.dtype, send.shape, op, root, splits))
                if plan is not None and not (
                    recv.flags.carray
                    and send.flags.c_contiguous
                    and not (plan.apart and np.may_share_memory(send, recv))
                ):
                    plan = None
            else:
                plan = self._plans.get(simple_key(collective, send, recv, op, root, splits))
                if plan is not None and recv is not None and plan.known_apart.may_overlap(send, recv):
                    plan = None
        except TypeError:  # an op that cannot be looked up is none
            plan = None
        if plan is None or timeout_s is not None:
            return self._submit_prepared(collective, send, recv, op, root, async_op, splits, timeout_s)
        # The record, as `recorder.begin` would make it. Above this function are the collective, and in most cases the
        # user's code; which is known to be that if it was last time.
        try:
            frame = _getframe(2)
        except ValueError:  # a thread began with the collective itself
            frame = _getframe(1)
        code = frame.f_code
        if code is not plan.caller:
            frame = users(frame)
            plan.caller = code = frame.f_code
        self.num_calls = sequence = self.num_calls + 1
        now = clock()
        record = [plan.facts, sequence, now, now, 0, code, frame.f_lasti]
        self._keep(record)
        if async_op or self._queued:
            return self._enqueue(plan.where, partial(self._plan_steps, plan, send, recv), recv, async_op, record)
        try:
            plan.run(send, recv)
        except BaseException as error:
            raise self.fail(error, plan.where, record) from None
        record[4] = clock()  # COMPLETED; a name would have to be looked up
        return recv

    def relabel(self, label: str) -> None:
        """Have messages call the group `label` from now on."""
        super().relabel(label)
        self._plans = {}
        self.messages.forget_kinds()

    def close(self, what: str = DESTROYED) -> None:
        """Let async calls end, and give back what the group holds; calls after it raise, and say `what` became of it.

        A message that has not come by then is given a few seconds: nobody else knows that it is waited for.
        """
        self._world.progress.drain(self._queue)
        self.messages.drain()
        self.messages.forget_kinds()
        self._plans.clear()
        self._engines.close()
        self._closed = self._closed or what

    def disown(self, what: str) -> None:
        """In a process that was forked of the rank: have calls raise, and say `what` became of the group."""
        self._closed, self._plans = what, {}
        self.messages.forget_kinds()

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one gives up, and why; calls after it raise."""
        self._world.tell_unmet(self, gave_up(reason))
        self._give_up(DistBackendError(reason))

    @property
    def is_broken(self) -> bool:
        """Whether a call has failed, or the group was closed: later calls raise."""
        return self._broken is not None or self._closed is not None

    @property
    def has_backend(self) -> bool:
        """Whether there is a backend, through which other ranks can be told what becomes of this one."""
        return self._engines.any_made

    @property
    def outstanding(self) -> int:
        """The number of async calls that are not done."""
        return len(self._queued) + self.messages.outstanding

    def check_usable(self, where: str) -> None:
        """Raise if the group is of no more use.

        Raises:
            ValueError: It was closed.
            DistBackendError: A call on it has failed; says with what.
        """
        if self._closed is not None:
            advice = "; make another with new_group() or init_process_group()" if self._closed == DESTROYED else ""
            raise ValueError(f"{where}: group {self.label!r} {self._closed}{advice}")
        if self._broken is not None:
            raise DistBackendError(
                f"{where}: the group is broken since: {self._broken}", peer_failed=self._broken.peer_failed
            )

    def carries(self, device: str) -> bool:
        """Return whether a backend of the group carries arrays on a device type, "cpu" or "cuda"."""
        return self._engines.carries(device)

    def device_calls(self, of: str) -> DeviceCalls | None:
        """Return what carries out the calls on arrays on a GPU; None where the group takes none.

        Raises:
            DistBackendError: The group takes them, but its backend cannot be used here; says why.
        """
        engine: Backend | None = self.named(self.where(of), self._engines.engine_for, "cuda")
        return None if engine is None else engine.device_calls

    def usable_backend(self, where: str, *buffers: Any) -> Backend:
        """Return what carries out a call on these arrays, or lists of them; raise if this rank cannot use it."""
        self.check_usable(where)
        if self._rank < 0:
            raise ValueError(
                f"{where}: global rank {self._world.rank} is not in this group, ranks {listed(self.ranks)}"
            )
        engine: Backend = self.named(where, self._engines.engine, buffers)
        return engine

    def _submit_prepared(
        self,
        collective: Collective[..., Any],
        send: Any,
        recv: Any,
        op: Op | None,
        root: int | None,
        async_op: bool,
        splits: Splits | None,
        timeout_s: float | None,
    ) -> Any:
        where = self.where(collective.name)
        backend = self.usable_backend(where, send, recv)
        if backend.device_calls is not None:
            rest = (async_op, splits, timeout_s, self._compares_shapes)
            return backend.device_calls.submit(Request(self, where, collective, send, recv, op, root, *rest))
        given = self.named(where, as_buffers, send, collective.names[0], "send" in collective.lists)
        in_place, taken = collective.in_place and recv is send, given
        if not in_place:
            taken = self.named(where, as_buffers, recv, collective.names[1], "recv" in collective.lists)
        reduce_op = None if op is None else self.named(where, as_reduce_op, op)
        sends = buffers.in_native_order(given)
        recvs = sends if in_place else buffers.in_native_order(taken)
        size, compares_shapes = len(self.ranks), self._compares_shapes
        call = Call(collective, where, self._rank, size, sends, recvs, reduce_op, root, splits, compares_shapes)
        writes = collective.writes(call)
        if writes:
            self.named(where, buffers.check_output, taken, recv, collective.names[1])
        factor = op if isinstance(op, PremulSum) else None
        if factor is not None:
            for array in each(given):
                self.named(where, factor.check, array, collective.names[0])
        # A plan does not know the factor: it is that of the plain sum.
        key = plan_key(collective, sends, recvs, op if factor is None else reduce_op, root, splits)
        plans = self._plans  # which may be others when an async call begins
        prepared = plans.get(key)
        if prepared is None:
            collective.check(call)
            backend.require(call)
            facts = facts_of(call, self.name, self.label, self.timeout_s)
        else:
            facts = prepared.facts
        if writes and isinstance(taken, list):
            self.named(where, check_apart, taken, collective.names[1])

        def steps() -> Iterator[Waitable]:
            self.check_usable(where)
            yield from backend.connect()
            plan = plans.get(key)
            if plan is None:
                plan = backend.prepare(call)
                plan.facts = facts
                remember(plans, key, plan)
            copies = writes and plan.apart and buffers.must_be_copied(call)
            sent = buffers.packed(given, copies) if factor is None else buffers.scaled(factor, given)
            received = sent if in_place else buffers.packed(taken)
            yield from plan.steps(sent, received)
            if writes:
                buffers.unpack(received, taken)

        self.num_calls += 1
        queued = async_op or bool(self._queued)
        record = self.recorder.begin(facts, self.num_calls, started=not queued)
        if queued:
            return self._enqueue(where, steps, recv, async_op, record, timeout_s)
        self._drive(where, backend, steps, None if timeout_s is None else Deadline(timeout_s), record)
        return recv

    def _enqueue(
        self, where: str, steps: Any, recv: Any, async_op: bool, record: Record, timeout_s: float | None = None
    ) -> Any:
        record[3] = 0  # it has not STARTED
        work = Work(where, recv)
        job = Job(steps, work, self.timeout_s if timeout_s is None else timeout_s, where, self.fail, record)
        try:
            self._world.progress.submit(self._queue, job)
        except DistError as error:
            raise self.fail(error, where, record) from None
        try:
            return work if async_op else work.result()
        except KeyboardInterrupt as error:  # nobody is there any more to take what the call would bring
            raise self.fail(error, where) from None

    def _plan_steps(self, plan: Plan, send: Any, recv: Any) -> Iterator[Waitable]:
        if self.is_broken:
            self.check_usable(plan.where)
        return plan.steps(send, recv)

    def _drive(self, where: str, backend: Backend, steps: Any, deadline: Deadline | None, record: Record) -> None:
        try:
            for waitable in steps():
                backend.wait(waitable, where, deadline)
        except BaseException as error:
            raise self.fail(error, where, record) from None
        self.recorder.end(record)

    def compare_shapes(self, wanted: bool) -> None:
        """Have calls from now on compare the shapes of what the ranks pass, or the numbers of elements alone."""
        self._compares_shapes = wanted
        self._plans = {}  # they know what they compare

    def ask_first(self, premise: Callable[[], str | None]) -> None:
        """Have the next call fail if `premise` is found broken: a function that returns how, or None."""
        self._engines.ask_first(premise)
        self.messages.forget_kinds()
        self._plans = {}  # a call that has one does not look for its engine

    def fail(self, error: BaseException, where: str, record: Record | None = None) -> BaseException:
        """Break the group: `error` ended the call of `record`, if there is one. Return what the caller gets."""
        # A call that ended half way leaves the ranks out of step, so the group is of no more use.
        error, cause = located(error, where, record)
        if record is not None:
            self.recorder.end(record, cause)
        self._give_up(cause)
        self._world.note_fault(cause)
        return error

    def _give_up(self, cause: DistError) -> None:
        # Not the exception itself: its frames would keep the shared memory alive.
        self._broken = self._broken or DistError(str(cause), peer_failed=cause.peer_failed)
        self.messages.forget_kinds()
        self._plans.clear()
        self._engines.abort(str(self._broken))

    def named(self, where: str, function: Any, *args: Any) -> Any:
        """Return `function(*args)`; what it finds wrong is raised with `where` before it."""
        try:
            return function(*args)
        except (DistBackendError, TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error.__cause__
