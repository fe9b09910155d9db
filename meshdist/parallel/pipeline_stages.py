"""PipelineStage: the functions of one stage, given or made by `autograd_stage`, and the sum of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshdist.arrays.trees import Tree


@dataclass(frozen=True)
class PipelineStage:
    """The functions of one stage of a pipeline; any callables.

    Values that go from stage to stage (`x`, `y`, `dy`, `dx`) are arrays or nested lists, tuples and dicts of arrays.
    They have the same shapes for every micro-batch. They are sent without a copy, so they must not be changed after
    they were returned. Give `backward`, or both of its halves, or all three.

    Attributes:
        forward: `forward(x, **kw) -> (y, saved)`. `saved` is any object that the backward pass needs.
        backward: `backward(saved, dy) -> (dx, grads)`: the gradients of `x` and of the stage's parameters, for `B` of a
            schedule. `dx` of the first stage is not used, and may be None.
        backward_input: `backward_input(saved, dy) -> (dx, rest)`, for `I` of a schedule. `rest` is any object.
        backward_weight: `backward_weight(rest) -> grads`, for `W` of a schedule.

    Raises:
        TypeError: A function is not callable.
        ValueError: One half of the backward pass is given and the other is not.

    Example:
        >>> import numpy as np
        >>> from meshdist.parallel import PipelineStage
        >>> w = np.array([[2.0]])
        >>> stage = PipelineStage(
        ...     forward=lambda x: (x @ w, x),
        ...     backward=lambda x, dy: (dy @ w.T, x.T @ dy),
        ... )
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Any, Any], tuple[Any, Any]] | None = None
    backward_input: Callable[[Any, Any], tuple[Any, Any]] | None = None
    backward_weight: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "backward_input", "backward_weight"):
            function = getattr(self, name)
            if not callable(function) and (function is not None or name == "forward"):
                raise TypeError(f"PipelineStage: {name} must be callable, got {type(function).__name__}")
        if (self.backward_input is None) != (self.backward_weight is None):
            given, missing = "backward_input", "backward_weight"
            if self.backward_input is None:
                given, missing = missing, given
            raise ValueError(f"PipelineStage: {given} is given without {missing}; pass both, or backward alone")

    @property
    def has_backward(self) -> bool:
        """Whether the stage can go backward."""
        return self.backward is not None or self.backward_input is not None

    def whole_backward(self, saved: Any, dy: Any) -> tuple[Any, Any]:
        """Return `(dx, grads)`, by `backward` or else by its halves."""
        if self.backward is not None:
            return pair_of(self.backward(saved, dy), "backward", "(dx, grads)")
        dx, finish = self.first_half(saved, dy)
        return dx, finish()

    def first_half(self, saved: Any, dy: Any) -> tuple[Any, Callable[[], Any]]:
        """Return `dx`, and a function that returns the gradients of the parameters.

        A stage that has only `backward` runs all of it here.
        """
        of_input, of_weight = self.backward_input, self.backward_weight
        if of_input is None or of_weight is None:
            dx, grads = self.whole_backward(saved, dy)
            return dx, lambda: grads
        dx, rest = pair_of(of_input(saved, dy), "backward_input", "(dx, rest)")
        return dx, lambda: of_weight(rest)

    def go_forward(self, x: Any, kw: dict[str, Any]) -> tuple[Any, Any]:
        """Return `(y, saved)`."""
        return pair_of(self.forward(x, **kw), "forward", "(y, saved)")


class WrongResultError(TypeError):
    """Report a function of the user that returned something else than it should."""


def pair_of(result: Any, name: str, what: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise WrongResultError(f"{name} must return the tuple {what}, got {type(result).__name__}")
    return result


class GradientSum:
    """The sum of the gradients of one stage over micro-batches."""

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self._leaves: list[Any] = []
        self._is_own = False  # the first gradients are the stage's

    def add(self, grads: Any) -> None:
        """Add the gradients of a micro-batch.

        Raises:
            TypeError: They are no tree of arrays.
            ValueError: They have other shapes than those of earlier micro-batches.
        """
        tree = Tree(grads, "grads")
        if self._tree is None:
            self._tree, self._leaves = tree, tree.leaves
            return
        if tree.text != self._tree.text:
            raise ValueError(f"gradients were {self._tree.text} for earlier micro-batches, and are {tree.text} now")
        for number, leaf in enumerate(tree.leaves):
            if self._is_own:
                self._leaves[number] += leaf
            else:
                self._leaves[number] = self._leaves[number] + leaf
        self._is_own = True

    def mean_over(self, count: int) -> Any:
        """Return the sum divided by `count`, in the structure of the gradients; None if there are none."""
        if self._tree is None:
            return None
        return self._tree.rebuilt(self._leaves if count == 1 else [leaf / count for leaf in self._leaves])


def autograd_stage(fun: Callable[..., Any], parameters: Any) -> PipelineStage:
    """Return a pipeline stage from its forward function: `meshdist.autograd` derives both halves of the backward pass.

    Nothing is computed twice: `backward_input` keeps the gradients that reach an operation with parameters, and
    `backward_weight` continues from there. A stage that gets integers, such as the first one of a language model, has
    no gradient of its input.

    Args:
        fun: `fun(parameters, x, **kw)` returns the output of the stage, an array or nested lists, tuples and dicts of
            arrays. It computes with the functions of `autograd.numpy` and `meshdist.autograd`.
        parameters: The stage's parameters: an array or nested lists, tuples and dicts of floating or complex NumPy
            arrays. They are looked up in each forward pass, so an optimizer may change them or their dict in place. The
            gradients have their structure.

    Raises:
        ImportError: The package autograd is not installed.
        TypeError: `fun` is not callable; later, from the stage, an operation has no gradient.

    Example:
        >>> import autograd.numpy as np
        >>> from meshdist.parallel import autograd_stage
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
