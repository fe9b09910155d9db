"""autograd_stage: the stage of a function whose backward pass meshdist.autograd makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshdist.parallel.pipeline_stages import PipelineStage


def autograd_stage(fun: Callable[..., Any], parameters: Any) -> PipelineStage:
    """Return a pipeline stage from its forward alone: `meshdist.autograd` makes both halves of the backward.

    The halves compute nothing twice: `backward_input` keeps the gradients that reach an operation with parameters, and
    `backward_weight` goes on from there. A stage that gets integers, such as the first one of a language model, has no
    gradient of its input.

    Args:
        fun: `fun(parameters, x, **kw)` returns the output of the stage, an array or nested lists, tuples and dicts of
            arrays. It computes with the functions of `autograd.numpy` and `meshdist.autograd`.
        parameters: The stage's parameters: an array or nested lists, tuples and dicts of floating or complex NumPy
            arrays. They are looked up in each forward, so an optimizer may change them or their dict in place. The
            gradients have their structure.

    Raises:
        ImportError: The package autograd is not installed.
        TypeError: `fun` is not callable; later, from the stage, an operation has no gradient.

    Example:
        >>> import autograd.numpy as np
        >>> stage = autograd_stage(lambda p, x: np.tanh(x @ p["w"]), {"w": np.eye(2)})
        >>> y, saved = stage.forward(np.zeros((1, 2)))
        >>> dx, rest = stage.backward_input(saved, np.array([[1.0, 2.0]]))
        >>> dx, stage.backward_weight(rest)
        (array([[1., 2.]]), {'w': array([[0., 0.],
               [0., 0.]])})
    """
    from meshdist.autograd.backward_halves import BackwardHalves, run_in_halves

    if not callable(fun):
        raise TypeError(f"autograd_stage: fun must be callable, got {type(fun).__name__}")

    def forward(x: Any, **kw: Any) -> tuple[Any, BackwardHalves]:
        return run_in_halves(fun, parameters, x, kw)

    def backward_input(saved: BackwardHalves, dy: Any) -> tuple[Any, BackwardHalves]:
        return saved.of_input(dy), saved

    return PipelineStage(forward, backward_input=backward_input, backward_weight=BackwardHalves.of_parameters)
