"""How long the parts of a training step take, and what a GradientReducer is: its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns


@dataclass(frozen=True)
class StepTimes:
    """The parts of one step on this rank, or their means, in seconds.

    Attributes:
        forward_s: From `zero()`, or else from the end of the step before, to the first `ready()`.
        backward_s: From the first `ready()` to `wait()`.
        communication_s: From the start of the first bucket to the end of `wait()`.
        overlap_s: The part of the communication during the backward pass: until `wait()`.
    """

    forward_s: float
    backward_s: float
    communication_s: float
    overlap_s: float

    def __str__(self) -> str:
        return (
            f"forward {1e3 * self.forward_s:.3f} ms, backward {1e3 * self.backward_s:.3f} ms, communication"
            f" {1e3 * self.communication_s:.3f} ms, of which {1e3 * self.overlap_s:.3f} ms overlap the backward pass"
        )


@dataclass(frozen=True)
class ReducerStatistics:
    """The parameters and buckets of a GradientReducer, and the times of its steps on this rank.

    Attributes:
        group: The label of the group.
        world_size: The number of its ranks.
        backend: The backends of the group.
        num_parameters: The number of parameters.
        parameter_bytes: The bytes of all gradients.
        bucket_bytes: The bytes of each bucket, in the order in which they are reduced.
        hook: The name of the communication hook.
        find_unused_parameters: The argument of the reducer.
        steps: How many steps were reduced.
        num_unused: The number of parameters without a gradient in the last step, for which zeros were used.
        last: The times of the last step; None before the first step.
        mean: The mean times of all steps; None before the first step.
    """

    group: str
    world_size: int
    backend: str
    num_parameters: int
    parameter_bytes: int
    bucket_bytes: tuple[int, ...]
    hook: str
    find_unused_parameters: bool
    steps: int
    num_unused: int
    last: StepTimes | None
    mean: StepTimes | None


class StepClock:
    """Takes the times of steps.

    Its methods are called in this order: `forward_begins` (optional), `backward_begins`, `communication_begins`,
    `backward_ends`, `step_ends`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.forward_ns = perf_counter_ns()
        self.backward_ns = self.communication_ns = self.backward_end_ns = self.end_ns = self.forward_ns
        self._totals = [0, 0, 0, 0]

    def forward_begins(self) -> None:
        self.forward_ns = perf_counter_ns()

    def backward_begins(self) -> None:
        self.backward_ns = perf_counter_ns()

    def communication_begins(self) -> None:
        self.communication_ns = perf_counter_ns()

    def backward_ends(self) -> None:
        self.backward_end_ns = perf_counter_ns()

    def step_ends(self) -> None:
        self.end_ns = end_ns = perf_counter_ns()
        totals, communication_ns = self._totals, self.communication_ns
        overlap_ns = self.backward_end_ns - communication_ns
        self.steps += 1
        totals[0] += self.backward_ns - self.forward_ns
        totals[1] += self.backward_end_ns - self.backward_ns
        totals[2] += end_ns - communication_ns
        totals[3] += overlap_ns if overlap_ns > 0 else 0
        self._last = (self.forward_ns, self.backward_ns, communication_ns, self.backward_end_ns, end_ns)
        self.forward_ns = end_ns

    def last(self) -> StepTimes | None:
        """Return the times of the last step; None before there is one."""
        if not self.steps:
            return None
        forward_ns, backward_ns, communication_ns, backward_end_ns, end_ns = self._last
        parts = (
            backward_ns - forward_ns,
            backward_end_ns - backward_ns,
            end_ns - communication_ns,
            max(0, backward_end_ns - communication_ns),
        )
        return StepTimes(*(part * 1e-9 for part in parts))

    def mean(self) -> StepTimes | None:
        """Return the mean times of all steps; None before there is one."""
        return StepTimes(*(total * 1e-9 / self.steps for total in self._totals)) if self.steps else None

    def is_sampled(self) -> bool:
        """Return whether the last step is one of those that are logged: the first, the tenth, each hundredth."""
        return self.steps in (1, 10) or self.steps % 100 == 0
