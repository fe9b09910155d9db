"""Simulate a schedule: when each action runs, how long ranks are idle, and how many activations they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshdist.parallel.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTES,
    FORWARD,
    Action,
)
from meshdist.parallel.pipeline_table import Table, execution_order
from meshdist.system.plurals import counted

Cost = float | Sequence[float]


@dataclass(frozen=True)
class PipelineCosts:
    """The times of the actions of a pipeline, in any unit: one number for all stages, or one for each.

    Attributes:
        forward: A forward pass.
        backward_input: The half of a backward pass that computes the gradient of the input.
        backward_weight: The half that computes the gradients of the weights.
        backward: A whole backward pass; None for the sum of its halves.
        message: From the end of a computation to the arrival of its result on another rank. Ranks compute meanwhile.

    Raises:
        ValueError: A cost is negative.

    Example:
        >>> from meshdist.parallel import PipelineCosts
        >>> PipelineCosts(forward=[1, 1, 3, 1], message=0.1)
        PipelineCosts(forward=[1, 1, 3, 1], backward_input=1.0, backward_weight=1.0, backward=None, message=0.1)
    """

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    backward: Cost | None = None
    message: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "backward", "message"):
            cost = getattr(self, name)
            if cost is not None and min(_each(cost), default=0.0) < 0:
                raise ValueError(f"PipelineCosts: {name} must not be negative, got {cost}")

    def of(self, action: Action) -> float:
        """Return how long an action takes; 0 for messages.

        Raises:
            ValueError: There is no cost for its stage.
        """
        if action.kind == FORWARD:
            return self._at("forward", self.forward, action.stage)
        if action.kind == BACKWARD and self.backward is not None:
            return self._at("backward", self.backward, action.stage)
        total = 0.0
        if action.kind in (BACKWARD, BACKWARD_INPUT):
            total += self._at("backward_input", self.backward_input, action.stage)
        if action.kind in (BACKWARD, BACKWARD_WEIGHT):
            total += self._at("backward_weight", self.backward_weight, action.stage)
        return total

    def _at(self, name: str, cost: Cost, stage: int) -> float:
        if isinstance(cost, Sequence):
            if stage >= len(cost):
                raise ValueError(
                    f"PipelineCosts: {name} has costs of {counted(len(cost), 'stage')}, and there is a stage {stage}"
                )
            return cost[stage]
        return cost


def _each(cost: Cost) -> Sequence[float]:
    return cost if isinstance(cost, Sequence) else (cost,)


class Span(NamedTuple):
    """An action and its time.

    Attributes:
        action: A computation.
        begin: When it began.
        end: When it ended.
    """

    action: Action
    begin: float
    end: float


class Times(NamedTuple):
    """The computations of each rank, in order, and how many activations each rank keeps at most."""

    rows: list[list[Span]]
    peaks: list[int]


def simulate(table: Table, costs: PipelineCosts) -> Times:
    """Return when each computation runs if it begins as soon as its rank is free and its inputs have arrived.

    Raises:
        ScheduleError: The schedule deadlocks.
        ValueError: A stage has no cost.
    """
    free = [0.0] * len(table.rows)
    ended: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in table.rows]
    for rank, step in execution_order(table):
        action = table.rows[rank][step]
        assert action is not None
        begin = free[rank]
        for need in table.needs(action):
            is_far = table.home[need.stage] != rank
            # A receive is posted early: the computation waits, and not the receive.
            begin = max(begin, ended[need] + (costs.message if is_far else 0.0))
        ended[action] = free[rank] = begin + costs.of(action)
        if action.kind in COMPUTES:
            rows[rank].append(Span(action, begin, ended[action]))
    return Times(rows, [peak_activations(row) for row in table.rows])


def peak_activations(row: Sequence[Action | None]) -> int:
    """Return how many activations a rank keeps at most: each from its forward pass to the end of its backward pass."""
    kept = peak = 0
    for action in row:
        if action is not None and action.kind == FORWARD:
            kept += 1
            peak = max(peak, kept)
        elif action is not None and action.kind in (BACKWARD, BACKWARD_WEIGHT):
            kept -= 1
    return peak
