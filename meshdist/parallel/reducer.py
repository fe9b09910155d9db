"""GradientReducer: averages the gradients of all ranks in flat buckets, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np

from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.parallel.bucket_reduction import DirectReduction, Hook, HookedReduction, hook_name
from meshdist.parallel.gradient_buckets import (
    FlatArrays,
    GradBucket,
    NamedViews,
    Parameter,
    StepFaults,
    agree_on,
    assigned,
    checked_count,
    gradient_like,
    names_text,
    parameters_of,
)
from meshdist.parallel.join_context import Joinable, JoinHook
from meshdist.parallel.step_times import ReducerStatistics, StepClock
from meshdist.runtime.context import GroupLike
from meshdist.runtime.log import RankLog, shows_calls
from meshdist.system.plurals import counted

_log = RankLog()
# An async call costs more than a sync one: where there is less to hide it behind, it does not pay.
_LEAST_HIDDEN_NS = 200_000


class GradientReducer(Joinable):
    """Averages gradients over the ranks of a group, as DistributedDataParallel does, for plain arrays.

    The gradients are views of flat buckets. A bucket is reduced by one async all_reduce, which starts once all its
    gradients are ready: in the order of the buckets, which is the same on all ranks. The last buckets are reduced by
    `wait` itself if, in the step before, it came less than 0.2 ms after them. All ranks create the reducer, and then
    make the same steps: `ready` for every parameter, in any order, and `wait`.

    `wait` raises the errors of any rank on all ranks, with the name of the parameter and the rank: a parameter without
    a gradient, a second `ready`, a gradient of a different shape or dtype and, with MESHDIST_DEBUG=DETAIL, NaNs. The
    group and the reducer can be used afterwards.

    Args:
        named_arrays: The parameters, or arrays like their gradients: a dict by name, or pairs (name, array). Floating
            or complex NumPy or CuPy arrays, of any shapes; the same names, shapes and dtypes on all ranks, in the same
            order.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        bucket_bytes: The size at which a bucket is closed, in bytes.
        first_bucket_bytes: The same for the first bucket, which is small so that communication begins early.
        hook: `hook(bucket)` reduces a GradBucket instead of the all_reduce. It returns a Work, a Future or an array,
            whose result becomes the content of the bucket, or None once it has changed the bucket in place. If it takes
            several rounds, it is a generator: it yields each Work to wait for, and returns the result. If it has an
            attribute `fault_group`, the ranks exchange faults over that group, in a separate small call. See
            `communication_hooks`.
        find_unused_parameters: At `wait`, parameters that have no gradient on this rank contribute zeros.

    Attributes:
        gradients: By name, the arrays to write gradients into, as by `gradients["w"] += gradient`, or with `out=`.
            After `wait` they are the averages.
        buckets: The GradBuckets, in the order in which they are reduced.

    Raises:
        TypeError: A parameter is not a floating or complex array, a number of bytes is not an integer, or the hook is
            not callable.
        ValueError: There are no parameters, two have the same name, a number of bytes is negative, or this rank is not
            in the group.
        DistBackendError: The ranks' parameters differ; raised on all ranks with the first difference.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> from meshdist.parallel import GradientReducer
        >>> def main():
        ...     reducer = GradientReducer({"w": np.zeros((2, 2)), "b": np.zeros(2)})
        ...     reducer.gradients["b"][...] = dist.get_rank()  # written in place: no copy
        ...     reducer.ready("b")
        ...     reducer.ready("w", np.eye(2))  # copied into its bucket
        ...     reducer.wait()
        ...     return {name: gradient.tolist() for name, gradient in reducer.gradients.items()}
        >>> dist.run(main, 2)[0]
        {'w': [[1.0, 0.0], [0.0, 1.0]], 'b': [0.5, 0.5]}
    """

    def __init__(
        self,
        named_arrays: Mapping[str, Any] | Iterable[tuple[str, Any]],
        group: GroupLike = None,
        bucket_bytes: int = 25 << 20,
        first_bucket_bytes: int = 1 << 20,
        hook: Hook | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self._group = members = resolve(group)
        self._prefix = members.error_prefix("GradientReducer")
        if members.rank() < 0:
            raise ValueError(f"{self._prefix}: this rank is not in the group; make it only on ranks of the group")
        bucket_bytes = checked_count(self._prefix, "bucket_bytes", bucket_bytes, 0)
        first_bucket_bytes = checked_count(self._prefix, "first_bucket_bytes", first_bucket_bytes, 0)
        if hook is not None and not callable(hook):
            raise TypeError(f"{self._prefix}: hook must be callable, got {hook!r:.80}")
        parameters = parameters_of(self._prefix, named_arrays)
        settings = (
            f"bucket_bytes={bucket_bytes}",
            f"first_bucket_bytes={first_bucket_bytes}",
            f"hook={hook_name(hook)}",
            f"find_unused_parameters={find_unused_parameters}",
        )
        agree_on(members, self._prefix, parameters, settings)
        self._arrays = {parameter.name: parameter.array for parameter in parameters}
        self._hook = hook
        self._finds_unused = find_unused_parameters
        self._make_buckets(assigned(parameters, bucket_bytes, first_bucket_bytes))
        self._is_synced = True
        self._accumulated: set[str] = set()
        self._faults = StepFaults(self._prefix)
        self._num_unused = 0
        self._clock = StepClock()
        self._is_detailed = False
        self._begin_step()
        _log.info(
            "%s: %d parameters, %d bytes, in %d bucket%s of %s bytes; %s",
            self._prefix,
            len(parameters),
            sum(parameter.nbytes for parameter in parameters),
            len(self.buckets),
            "" if len(self.buckets) == 1 else "s",
            ", ".join(str(bucket.buffer().nbytes) for bucket in self.buckets),
            ", ".join(settings),
        )

    def _make_buckets(self, assignment: list[list[Parameter]]) -> None:
        made: dict[str, Any] = {}
        buckets: list[GradBucket] = []
        self._reductions: list[DirectReduction | HookedReduction] = []
        self._bucket_of: dict[str, int] = {}
        self._flats: list[Any] = []
        for index, some in enumerate(assignment):
            arrays = FlatArrays(self._group, some, extra=1 if self._hook is None else 0)
            is_last = index == len(assignment) - 1
            bucket = GradBucket(self._group, index, is_last, some, arrays.flat[: arrays.size])
            if self._hook is None:
                self._reductions.append(DirectReduction(bucket, arrays.flat))
            else:
                self._reductions.append(HookedReduction(bucket, self._hook))
            buckets.append(bucket)
            self._flats.append(arrays.flat)
            made.update(arrays.views)
            self._bucket_of.update(dict.fromkeys(arrays.views, index))
        self.buckets = tuple(buckets)
        self._views = {name: made[name] for name in self._arrays}
        self.gradients = NamedViews(self._views)
        self._num_in_bucket = [len(some) for some in assignment]
        self._full_ns = [0] * len(buckets)  # when each bucket was full in the last step
        self._num_early = len(buckets)  # how many are reduced before `wait`
        self._num_parameters = len(made)

    def __repr__(self) -> str:
        label, count = self._group.label, len(self.gradients)
        return f"<GradientReducer on group {label!r}: {count} parameters in {counted(len(self.buckets), 'bucket')}>"

    def ready(self, name: str, gradient: Any = None) -> None:
        """Say that the gradient of a parameter is complete; start the reduction of its bucket if that is full.

        Do not use the gradient after that until `wait` returns.

        Args:
            name: The name of the parameter.
            gradient: An array of the shape and dtype of the parameter, which is copied into the bucket. None if the
                gradient was written into `gradients[name]`, which costs no copy. After steps inside `no_sync`, it is
                added to what they have left.

        Raises:
            RuntimeError: All gradients of the step are ready already, and `wait` was not called.
        """
        if gradient is not None or not self._is_quick:
            if name not in self._waiting:
                self._refuse(name)
                return
            self._take(name, gradient)
            if not self._is_synced:
                return
        index = self._waiting.pop(name, None)
        if index is None:
            self._refuse(name)
            return
        self._num_waiting[index] -= 1
        if index == self._num_started and not self._num_waiting[index]:
            self._start_full()

    def wait(self) -> None:
        """Finish the step: wait until `gradients` are the averages over all ranks. Inside `no_sync`, do nothing.

        Raises:
            DistBackendError: On all ranks, if on one of them a parameter has no gradient, or another fault was found;
                the message has all faults by rank. Or a rank failed.
            DistTimeoutError: A rank did not make this step within the group's timeout.
        """
        if not self._is_synced:
            return
        if len(self._waiting) == self._num_parameters:
            self._clock.backward_begins()
        self._clock.backward_ends()
        self._num_unused = len(self._waiting)
        if self._waiting:
            self._complete([name for name in self.gradients if name in self._waiting])
        try:
            rounds: list[DirectReduction | HookedReduction] = self._reductions
            while rounds:
                has_fault = bool(self._faults)
                rounds = [reduction for reduction in rounds if reduction.advance(has_fault)]
            has_fault = self._has_fault()
            factor = 1.0 if self.join is None else self.join_factor()
            if has_fault:
                self._faults.raise_on_all(self._fault_group)
        finally:
            self._begin_step()
        if factor != 1.0:
            for bucket in self.buckets:
                bucket.buffer()[...] *= factor
        self._accumulated.clear()
        self._clock.step_ends()
        if self._hook is None:
            last_ns = self._clock.backward_end_ns - _LEAST_HIDDEN_NS
            self._num_early = sum([full_ns < last_ns for full_ns in self._full_ns])
        if self._is_detailed and self._clock.is_sampled():
            unused = f"; no gradient for {self._num_unused} of the parameters" if self._num_unused else ""
            _log.debug("%s: step %d: %s%s", self._prefix, self._clock.steps, self._clock.last(), unused)

    def average(self, gradients: Mapping[str, Any]) -> NamedViews:
        """Make a whole step with complete gradients: `ready` for each, the last one first, and `wait`.

        Args:
            gradients: This rank's gradients by name, for all parameters; they are copied.

        Returns:
            The averages: `gradients` of the reducer, which the next step overwrites.

        Raises:
            TypeError: `gradients` is not a mapping.
            DistBackendError: The step is wrong on a rank, as described for `wait`, or a rank failed.
        """
        if not isinstance(gradients, Mapping):
            raise TypeError(f"{self._prefix}: gradients must be a dict by name, got {type(gradients).__name__}")
        for name in reversed(list(gradients)):
            self.ready(name, gradients[name])
        self.wait()
        return self.gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank: inside the block nothing is sent.

        `ready(name, gradient)` adds to the gradients of the earlier steps; with `gradients[name]`, use `+=`. The first
        step after the block reduces the sums. All ranks use it for the same steps.

        Raises:
            RuntimeError: The block begins in the middle of a step.
        """
        self._check_between_steps("no_sync begins")
        before, self._is_synced = self._is_synced, False
        try:
            yield
        finally:
            self._is_synced = before

    def zero(self) -> None:
        """Set all gradients to zero, for a step that adds to them; it also marks the beginning of the forward pass.

        Raises:
            RuntimeError: A step is in progress: `wait` was not called.
        """
        self._check_between_steps("zero()")
        for flat in self._flats:
            flat[...] = 0
        self._accumulated.clear()
        self._clock.forward_begins()

    def statistics(self) -> ReducerStatistics:
        """Return the parameters and buckets of the reducer, and the times of the parts of its steps on this rank."""
        bucket_bytes = tuple(int(bucket.buffer().nbytes) for bucket in self.buckets)
        return ReducerStatistics(
            group=self._group.label,
            world_size=self._group.size(),
            backend=self._group.backend_name,
            num_parameters=len(self.gradients),
            parameter_bytes=sum(bucket_bytes),
            bucket_bytes=bucket_bytes,
            hook=hook_name(self._hook),
            find_unused_parameters=self._finds_unused,
            steps=self._clock.steps,
            num_unused=self._num_unused,
            last=self._clock.last(),
            mean=self._clock.mean(),
        )

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group of the reducer."""
        return self._group

    def join_hook(self) -> JoinHook:
        """Return the hook that makes steps of zeros.

        Raises:
            RuntimeError: The loop was left in the middle of a step.
        """
        self._check_between_steps("uneven_inputs ends")
        return _ShadowSteps(self)

    def join_parameters(self) -> Any:
        """Return the arrays that were passed to the reducer."""
        return list(self._arrays.values())

    def shadow_step(self) -> None:
        """Make a step with gradients of zero, for the other ranks."""
        self.zero()
        self._clock.backward_begins()
        self._waiting.clear()
        self._complete([])
        self.wait()

    def _check_between_steps(self, what: str) -> None:
        if len(self._waiting) != self._num_parameters:
            raise RuntimeError(f"{self._prefix}: {what} in the middle of a step; call wait() before it")

    def _begin_step(self) -> None:
        self._waiting = self._bucket_of.copy()  # the bucket of each parameter that is not ready
        self._num_waiting = self._num_in_bucket.copy()
        self._num_started = 0
        self._faults.clear()
        self._is_quick = False  # whether a gradient that is in its bucket needs no more than to be counted

    def _take(self, name: str, gradient: Any) -> None:
        if len(self._waiting) == self._num_parameters:
            self._clock.backward_begins()
            self._is_detailed = self._is_synced and shows_calls()
            self._is_quick = self._is_synced and not self._is_detailed
        if gradient is not None and gradient is not self._views[name]:
            self._copy_in(name, gradient)
        if not self._is_synced:
            self._accumulated.add(name)
        elif self._is_detailed:
            self._check_nan(name)

    def _start_full(self) -> None:
        # Each bucket after the one before, so that all ranks make the same calls.
        while self._num_started < len(self.buckets) and not self._num_waiting[self._num_started]:
            self._start_next()

    def _start_next(self) -> None:
        if not self._num_started:
            self._clock.communication_begins()
        index, self._num_started = self._num_started, self._num_started + 1
        self._full_ns[index] = perf_counter_ns()
        try:
            if self.join is not None and index == 0:
                self.notify_join_context()
            if index < self._num_early:
                self._reductions[index].start(bool(self._faults))
        except BaseException:
            self._begin_step()
            raise

    def _complete(self, missing: list[str]) -> None:
        """Start the buckets that are not full, for which the other ranks wait."""
        if missing and self._finds_unused:
            for name in missing:
                if name not in self._accumulated:
                    self._views[name][...] = 0
        elif missing:
            self._faults.add_missing(missing)
        while self._num_started < len(self.buckets):
            self._start_next()

    def _copy_in(self, name: str, gradient: Any) -> None:
        view = self._views[name]
        try:
            array = gradient_like(view, name, gradient)
        except (TypeError, ValueError) as error:
            self._faults.add(str(error))
            return
        if name not in self._accumulated:
            view[...] = array
        elif not (isinstance(array, np.ndarray) and np.may_share_memory(array, view)):
            view += array

    def _check_nan(self, name: str) -> None:
        count = int(np.isnan(self._views[name]).sum())
        if count:
            self._faults.add(f"the gradient of {name!r} has {count} NaN{'' if count == 1 else 's'}")

    def _refuse(self, name: str) -> None:
        if not self._waiting:
            what = (
                f"ready({name!r}): all gradients of this step are ready already; call wait() before the next step, or"
                " make steps that only accumulate inside no_sync()"
            )
            raise RuntimeError(f"{self._prefix}: {what}")
        if name in self._bucket_of:
            self._faults.add(f"ready({name!r}) was called twice; call wait() before the next step, or use no_sync()")
        else:
            known = names_text(list(self._views))
            self._faults.add(f"ready({name!r}): there is no such parameter; there are {known}")

    def _has_fault(self) -> bool:
        """Return whether a rank has found a fault in this step."""
        if self._hook is None:
            return any([reduction.has_fault for reduction in self._reductions])  # noqa: C419 - faster
        return self._faults.are_on_any_rank(self._fault_group)

    @property
    def _fault_group(self) -> ProcessGroup | None:
        group: ProcessGroup | None = getattr(self._hook, "fault_group", self._group)
        return group


class _ShadowSteps(JoinHook):
    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def main_hook(self) -> None:
        self._reducer.shadow_step()
