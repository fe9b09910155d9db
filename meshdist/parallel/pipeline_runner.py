"""PipelineRunner: run a schedule on the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshdist.collectives.objects import all_gather_object
from meshdist.errors import DistError
from meshdist.groups.world import resolve
from meshdist.parallel.microbatches import merge_microbatches, split_keywords, split_microbatches
from meshdist.parallel.pipeline_execution import Execution, Feed
from meshdist.parallel.pipeline_schedules import Schedule
from meshdist.parallel.pipeline_simulation import Span, peak_activations
from meshdist.parallel.pipeline_stages import PipelineStage, WrongResultError
from meshdist.parallel.pipeline_table import ScheduleError
from meshdist.parallel.pipeline_timeline import PipelineTimeline
from meshdist.parallel.pipeline_transfers import Transfers
from meshdist.runtime.context import GroupLike
from meshdist.runtime.rank_text import ranks_text
from meshdist.system.plurals import counted

Loss = Callable[[Any, Any], tuple[Any, Any]]


class PipelineStep(NamedTuple):
    """The results of a step on this rank.

    Attributes:
        outputs: On the rank of the last stage, its outputs, concatenated along dimension 0; elsewhere None.
        losses: On the rank of the last stage, the loss of each micro-batch, in order; elsewhere, and without a target,
            None.
        gradients: For each stage of this rank, the sum of its gradients over the micro-batches, divided by their number
            unless `scale_grads=False`; empty after `eval`.
    """

    outputs: Any
    losses: list[Any] | None
    gradients: dict[int, Any]


class PipelineRunner:
    """The stages of this rank in a pipeline, run by a schedule. All ranks of the group create it together.

    The ranks compare their schedules once. If a stage raises an error, the calls of the other ranks raise as well;
    after that the group cannot be used.

    Args:
        stages: This rank's stages: a dict by stage, a list in the order of `schedule.stages_of(rank)`, or the only one.
        schedule: The schedule, the same on all ranks.
        group: The axis of the pipeline, such as `mesh["pp"]`; the world if None.
        loss: On the rank of the last stage, `loss(y, target) -> (loss, dy)` of one micro-batch. Needed to go backward.
        scale_grads: Divide gradients by the number of micro-batches, for a loss that is a mean over its batch. With
            False they are summed, for a loss that is a sum.
        split: `split(batch, num_microbatches, name)` returns a list; by default equal parts along dimension 0.
        merge: `merge(parts)` makes `outputs`; by default along dimension 0.
        first_tag: The messages have tags from here on, fewer than `2 * stages * (micro-batches + 1)`.

    Attributes:
        schedule: The schedule, with its messages.

    Raises:
        TypeError: A stage is not a `PipelineStage`.
        ValueError: A stage is missing or is another rank's, the group and the schedule differ in size, or there is
            no loss or backward function for a schedule that goes backward; raised on all ranks, naming the rank.
        ScheduleError: The schedule does not pass its `check`, or the ranks have different ones; raised on all ranks.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> from meshdist.parallel import PipelineRunner, PipelineStage
        >>> from meshdist.parallel import one_f_one_b
        >>> def main():
        ...     mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        ...     w = np.full((1, 1), 2.0 + dist.get_rank())
        ...     stage = PipelineStage(lambda x: (x @ w, x), lambda x, dy: (dy @ w.T, x.T @ dy))
        ...     loss = lambda y, target: (np.mean((y - target) ** 2), 2 * (y - target) / y.size)
        ...     runner = PipelineRunner(stage, one_f_one_b(2, 4), mesh["pp"], loss=loss)
        ...     step = runner.step(np.ones((8, 1)), target=np.zeros((8, 1)))  # x is used by rank 0, target by rank 1
        ...     return step.losses, step.gradients
        >>> dist.run(main, 2)[1]
        ([np.float64(36.0), np.float64(36.0), np.float64(36.0), np.float64(36.0)], {1: array([[24.]])})
    """

    def __init__(
        self,
        stages: PipelineStage | Mapping[int, PipelineStage] | Sequence[PipelineStage],
        schedule: Schedule,
        group: GroupLike = None,
        *,
        loss: Loss | None = None,
        scale_grads: bool = True,
        split: Callable[[Any, int, str], list[Any]] = split_microbatches,
        merge: Callable[[list[Any]], Any] = merge_microbatches,
        first_tag: int = 0,
    ) -> None:
        self._group = resolve(group)
        self._loss = loss
        self._scale_grads = scale_grads
        self._split, self._merge = split, merge
        self._spans: list[Span] = []
        rank = self._group.rank()
        problem: Exception | None = None
        try:
            self._stages = _stages_of(stages, schedule, rank, self._group.size(), loss)
            schedule.check()
        except (TypeError, ValueError) as error:
            problem = error
        self._agree(schedule, problem)
        self.schedule = schedule.with_messages()
        self._schedules = {False: self.schedule, True: self.schedule.forward_only()}
        self._rows = {forward_only: self._row(run) for forward_only, run in self._schedules.items()}
        self._transfers = Transfers(self._group, self.schedule, first_tag)

    def step(self, x: Any = None, target: Any = None, *, return_outputs: bool = True, **kw: Any) -> PipelineStep:
        """Run one batch through the pipeline, forward and backward. All ranks call it.

        Args:
            x: On the rank of the first stage, the batch: an array, or a tree of arrays, which is split into micro-
                batches along dimension 0. Ignored elsewhere.
            target: On the rank of the last stage, the second argument of `loss`, split likewise. Ignored elsewhere.
            return_outputs: Whether to keep the outputs of the last stage.
            kw: Keyword arguments of the forward functions of this rank. Arrays are split likewise; other values are
                passed on.

        Returns:
            Outputs, losses and gradients; see `PipelineStep`.

        Raises:
            ValueError: The micro-batches would be unequal, or a result of a stage has a different shape from earlier
                ones. The other ranks raise DistBackendError, which names the cause.
            FloatingPointError: At debug level DETAIL, a stage returned NaN or infinity.
            DistError: Another rank failed, or a message did not arrive within the timeout.
        """
        return self._run("step", x, target, kw, return_outputs, not self.schedule.has_backward)

    def eval(self, x: Any = None, target: Any = None, *, return_outputs: bool = True, **kw: Any) -> PipelineStep:
        """Run one batch forward only; arguments, result and errors are those of `step`."""
        return self._run("eval", x, target, kw, return_outputs, True)

    def forget_shapes(self) -> None:
        """Expect other shapes from the next step on. All ranks call it between the same two steps."""
        self._transfers.forget_shapes()

    def timeline(self) -> PipelineTimeline:
        """Return the measured times of the computations of all ranks in the last step. All ranks call it.

        The clock is that of the host, so pictures over several hosts are off by the difference of their clocks.
        """
        spans: list[Any] = [None] * self._group.size()
        all_gather_object(spans, self._spans, self._group)
        peaks = [peak_activations([span.action for span in row]) for row in spans]
        return PipelineTimeline(f"{self.schedule.name}, measured", spans, peaks, "s")

    def _run(
        self, of: str, x: Any, target: Any, kw: dict[str, Any], return_outputs: bool, forward_only: bool
    ) -> PipelineStep:
        self._spans = []
        error_prefix = self._group.error_prefix(f"PipelineRunner.{of}")
        execution = Execution(
            *(self._stages, self._transfers, self._loss, self.schedule),
            keeps_outputs=return_outputs,
            goes_backward=not forward_only,
        )
        try:
            execution.feed = self._feed(x, target, kw, needs_target=not forward_only)
            self._transfers.begin(self._schedules[forward_only])
            for action in self._rows[forward_only]:
                execution.do(action)
            self._transfers.finish()
            self._spans = execution.spans
            return self._result(execution, forward_only)
        except BaseException as error:
            self._give_up(error, execution, error_prefix)
            raise

    def _give_up(self, error: BaseException, execution: Execution, error_prefix: str) -> None:
        """Tell the other ranks why this one goes no further; raise `error` with the action, if it can be put before."""
        raised: BaseException = error
        if execution.is_ours or isinstance(error, WrongResultError):
            kind = next((kind for kind in _OURS if isinstance(error, kind)), None)
            if kind is not None:
                raised = kind(f"{error_prefix}: {execution.where}{error}")
        if not self._group.is_broken:
            words = f"{error_prefix}: {execution.where}{type(raised).__name__}: {error}"
            self._group.abort(words)
        if raised is not error:
            raise raised from None
        if execution.where and hasattr(error, "add_note") and not isinstance(error, DistError):
            error.add_note(f"raised in {error_prefix}: {execution.where.rstrip(': ')}")

    def _result(self, execution: Execution, forward_only: bool) -> PipelineStep:
        num = self.schedule.num_microbatches
        outputs = losses = None
        if execution.outputs:
            outputs = self._merge([execution.outputs[number] for number in range(num)])
        if execution.losses:
            losses = [execution.losses[number] for number in range(num)]
        count = num if self._scale_grads else 1
        gradients = {} if forward_only else {stage: g.mean_over(count) for stage, g in execution.gradients.items()}
        return PipelineStep(outputs, losses, gradients)

    def _feed(self, x: Any, target: Any, kw: dict[str, Any], needs_target: bool) -> Feed:
        num, last = self.schedule.num_microbatches, self.schedule.num_stages - 1
        xs: list[Any] = []
        targets: list[Any] | None = None
        if 0 in self._stages:
            if x is None:
                raise ValueError("x is None on the rank of the first stage, which needs the batch")
            xs = self._cut(x, "x")
        if last in self._stages and self._loss is not None:
            if target is not None:
                targets = self._cut(target, "target")
            elif needs_target:
                raise ValueError("target is None on the rank of the last stage, whose loss needs it")
        return Feed(xs, targets, split_keywords(kw, num))

    def _cut(self, batch: Any, name: str) -> list[Any]:
        num = self.schedule.num_microbatches
        parts = self._split(batch, num, name)
        if len(parts) != num:
            raise ValueError(f"split returned {len(parts)} micro-batches of {name}, and the schedule has {num}")
        return parts

    def _row(self, schedule: Schedule) -> list[Any]:
        return [action for action in schedule.rows[self._group.rank()] if action is not None]

    def _agree(self, schedule: Schedule, problem: Exception | None) -> None:
        """Raise on all ranks if one has a problem, or if their schedules differ."""
        error_prefix = self._group.error_prefix("PipelineRunner")
        kind = None if problem is None else next(kind for kind in _KINDS if isinstance(problem, kind)).__name__
        digest = schedule.digest if isinstance(schedule, Schedule) else ""
        mine = digest, repr(schedule), kind, str(problem)
        found: list[Any] = [None] * self._group.size()
        all_gather_object(found, mine, self._group)
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, (digest, text, _, _) in enumerate(found):
            ranks.setdefault((digest, text), []).append(rank)
        if len({digest for digest, _ in ranks} - {""}) > 1:
            have = "; ".join(
                f"{ranks_text(members)}: {text} [{digest[:8]}]" for (digest, text), members in ranks.items()
            )
            raise ScheduleError(f"{error_prefix}: the ranks have different schedules: {have}; all pass the same one")
        failed = [(rank, kind, text) for rank, (_, _, kind, text) in enumerate(found) if kind is not None]
        if failed:
            raising = next(kind for kind in _KINDS if kind.__name__ == failed[0][1])
            parts = dict.fromkeys(text for _, _, text in failed)
            if len(parts) == 1 and len(failed) == len(found):
                raise raising(f"{error_prefix}: {failed[0][2]}")
            raise raising(f"{error_prefix}: " + "; ".join(f"on rank {rank}: {text}" for rank, _, text in failed))


_OURS: tuple[type[Exception], ...] = (ValueError, TypeError, FloatingPointError)
_KINDS: tuple[type[Exception], ...] = (ScheduleError, ValueError, TypeError)


def _stages_of(
    stages: PipelineStage | Mapping[int, PipelineStage] | Sequence[PipelineStage],
    schedule: Schedule,
    rank: int,
    size: int,
    loss: Loss | None,
) -> dict[int, PipelineStage]:
    """Return this rank's stages by number, checked against the schedule."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a Schedule, such as one_f_one_b(4, 8), got {type(schedule).__name__}")
    if isinstance(stages, PipelineStage):
        stages = [stages]
    if not isinstance(stages, (Mapping, Sequence)):
        raise TypeError(f"stages must be a PipelineStage, a list or a dict of them, got {type(stages).__name__}")
    if schedule.num_ranks != size:
        raise ValueError(f"the schedule is for {counted(schedule.num_ranks, 'rank')}, and the group has {size}")
    needed = schedule.stages_of(rank)
    stages_text = ranks_text(needed, "stage")
    if not isinstance(stages, Mapping):
        if len(stages) != len(needed):
            raise ValueError(
                f"the schedule has {stages_text} on this rank, and {len(stages)} were given; pass one for each,"
                " in this order"
            )
        stages = dict(zip(needed, stages, strict=True))
    missing, foreign = sorted(set(needed) - set(stages)), sorted(set(stages) - set(needed))
    if missing:
        raise ValueError(f"stage {missing[0]} is missing; the schedule has {stages_text} on this rank")
    if foreign:
        raise ValueError(f"stage {foreign[0]} is not this rank's; the schedule has {stages_text} here")
    for number, stage in stages.items():
        if not isinstance(stage, PipelineStage):
            raise TypeError(f"stage {number} must be a PipelineStage, got {type(stage).__name__}")
        if schedule.has_backward and not stage.has_backward:
            raise ValueError(f"stage {number} has no backward function, and the schedule goes backward")
    if schedule.has_backward and schedule.num_stages - 1 in needed and loss is None:
        raise ValueError("the rank of the last stage needs loss=, since the schedule goes backward")
    return {number: stages[number] for number in needed}
