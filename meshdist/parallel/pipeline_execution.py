"""Execution: one step of a pipeline on one rank, action by action."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from meshdist.arrays.trees import Tree
from meshdist.debug.debug_level import DebugLevel, get_debug_level
from meshdist.parallel.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    described,
)
from meshdist.parallel.pipeline_schedules import Schedule
from meshdist.parallel.pipeline_simulation import Span
from meshdist.parallel.pipeline_stages import GradientSum, PipelineStage, pair_of
from meshdist.parallel.pipeline_transfers import Transfers


@dataclass(frozen=True)
class Feed:
    """What a step gets from outside, for each micro-batch: empty where it is not this rank's."""

    xs: list[Any]
    targets: list[Any] | None
    keywords: list[dict[str, Any]]


class _Leaves:
    """The dtypes and shapes of the arrays in a value, by their places in it."""

    def __init__(self, value: Any, name: str) -> None:
        tree = Tree(value, name)
        pairs = zip(tree.names, tree.leaves, strict=True)
        self._name = name
        self._at = {place[len(name) :]: (leaf.dtype, leaf.shape) for place, leaf in pairs}

    def check_gradient(self, gradient: Any) -> None:
        """Check the arrays of a gradient of the value; those of some may be left out, as of integers.

        Raises:
            TypeError: It is no tree of arrays.
            ValueError: There is no array in this place of the value, or one of a different dtype or shape.
        """
        name = f"d{self._name}"
        for place, (dtype, shape) in _Leaves(gradient, name)._at.items():
            of = f"{self._name}{place}"
            wanted_dtype, wanted_shape = self._at.get(place, (None, ()))
            if wanted_dtype is None:
                raise ValueError(f"{name}{place} is a gradient of {of}, and there is no {of}")
            if wanted_shape != shape or (wanted_dtype != dtype and wanted_dtype.kind in "fc"):
                raise ValueError(
                    f"{name}{place} must be like {of}, {wanted_dtype}{list(wanted_shape)}, got {dtype}{list(shape)}"
                )


class Execution:
    """The state of one step.

    Attributes:
        feed: Set before the first action.
        outputs: What the last stage returned, by micro-batch.
        losses: By micro-batch.
        gradients: The sum of each stage.
        spans: The computations that were done.
        where: The action that is being done, to begin messages with; empty between actions.
        is_ours: Whether an error comes from here, and not from a stage or a loss.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        transfers: Transfers,
        loss: Callable[[Any, Any], tuple[Any, Any]] | None,
        schedule: Schedule,
        *,
        keeps_outputs: bool,
        goes_backward: bool,
    ) -> None:
        self._stages = stages
        self._transfers = transfers
        self._loss = loss
        self._last = schedule.num_stages - 1
        self._keeps_outputs = keeps_outputs
        self._goes_backward = goes_backward
        self._checks_finite = get_debug_level() is DebugLevel.DETAIL
        # By stage and micro-batch: values that come from a stage of this rank or go to another rank, and the rest.
        self._given: dict[tuple[int, int, str], Any] = {}
        self._saved: dict[tuple[int, int], Any] = {}
        self._unfinished: dict[tuple[int, int], Callable[[], Any]] = {}
        self._inputs: dict[tuple[int, int], _Leaves] = {}  # what the gradients that go back have to be like
        self.feed = Feed([], None, [])
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, Any] = {}
        self.gradients = {stage: GradientSum() for stage in stages}
        self.spans: list[Span] = []
        self.where = ""
        self.is_ours = True

    def do(self, action: Action) -> None:
        """Do one action."""
        stage, kind, microbatch = action
        self.where = f"{described(action)}: "
        if kind in (SEND_F, SEND_B):
            self._transfers.send(action, self._given.pop((stage, microbatch, kind)))
        elif kind in (RECV_F, RECV_B):
            self._transfers.post(action)
        else:
            _DO[kind](self, action)
        self.where = ""

    def _forward(self, action: Action) -> None:
        stage, _, microbatch = action
        x = self.feed.xs[microbatch] if stage == 0 else self._input(stage, microbatch, RECV_F, stage - 1)
        begin = perf_counter()
        y, saved = self._call(self._stages[stage].go_forward, x, self.feed.keywords[microbatch])
        if stage == self._last:
            if self.feed.targets is not None and self._loss is not None:
                result = self._call(self._loss, y, self.feed.targets[microbatch])
                loss, dy = pair_of(result, "loss", "(loss, dy)")
                if self._goes_backward:
                    _Leaves(y, "y").check_gradient(dy)
                self._given[stage, microbatch, RECV_B] = dy
                self.losses[microbatch] = loss
                self._check_finite(loss, "the loss")
            if self._keeps_outputs:
                self.outputs[microbatch] = y
        self._end(action, begin)
        self._check_finite(y, "y")
        if self._goes_backward:
            self._saved[stage, microbatch] = saved
            if stage:
                self._inputs[stage, microbatch] = _Leaves(x, "x")
        if stage < self._last:
            self._pass_on(stage + 1, (stage + 1, microbatch, RECV_F), (stage, microbatch, SEND_F), y)

    def _backward(self, action: Action) -> None:
        stage, _, microbatch = action
        dy = self._input(stage, microbatch, RECV_B, stage + 1)
        begin = perf_counter()
        saved = self._saved.pop((stage, microbatch))
        dx, grads = self._call(self._stages[stage].whole_backward, saved, dy)
        self._add(stage, grads)
        self._end(action, begin)
        self._give_gradient(stage, microbatch, dx)

    def _backward_input(self, action: Action) -> None:
        stage, _, microbatch = action
        dy = self._input(stage, microbatch, RECV_B, stage + 1)
        begin = perf_counter()
        saved = self._saved.pop((stage, microbatch))
        dx, self._unfinished[stage, microbatch] = self._call(self._stages[stage].first_half, saved, dy)
        self._end(action, begin)
        self._give_gradient(stage, microbatch, dx)

    def _backward_weight(self, action: Action) -> None:
        stage, _, microbatch = action
        begin = perf_counter()
        self._add(stage, self._call(self._unfinished.pop((stage, microbatch))))
        self._end(action, begin)

    def _input(self, stage: int, microbatch: int, receive: str, source: int) -> Any:
        """Return what a stage of this rank has made, or what comes from another rank."""
        if source in self._stages or source > self._last:
            return self._given.pop((stage, microbatch, receive))
        return self._transfers.wait(Action(stage, receive, microbatch))

    def _pass_on(self, to: int, here: tuple[int, int, str], away: tuple[int, int, str], value: Any) -> None:
        self._given[here if to in self._stages else away] = value

    def _give_gradient(self, stage: int, microbatch: int, dx: Any) -> None:
        if stage == 0:
            return
        if dx is None:
            raise ValueError("dx is None, and the stage before needs the gradient of its output")
        self._inputs.pop((stage, microbatch)).check_gradient(dx)
        self._check_finite(dx, "dx")
        self._pass_on(stage - 1, (stage - 1, microbatch, RECV_B), (stage, microbatch, SEND_B), dx)

    def _add(self, stage: int, grads: Any) -> None:
        self._check_finite(grads, "grads")
        self.gradients[stage].add(grads)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.is_ours = False
        result = function(*args)
        self.is_ours = True
        return result

    def _end(self, action: Action, begin: float) -> None:
        self.spans.append(Span(action, begin, perf_counter()))

    def _check_finite(self, value: Any, name: str) -> None:
        if not self._checks_finite:
            return
        tree = Tree(value, name)
        for leaf, leaf_name in zip(tree.leaves, tree.names, strict=True):
            if leaf.dtype.kind in "fc" and not bool(np.isfinite(leaf).all()):
                what = "NaN" if bool(np.isnan(leaf).any()) else "infinity"
                raise FloatingPointError(f"{leaf_name} has {what}")


_DO: dict[str, Callable[[Execution, Action], None]] = {
    FORWARD: Execution._forward,
    BACKWARD: Execution._backward,
    BACKWARD_INPUT: Execution._backward_input,
    BACKWARD_WEIGHT: Execution._backward_weight,
}
