"""The backward pass in two halves: the gradient of the input, which another rank waits for, and of the parameters.

An operation such as `x @ w` passes its gradient on to `x` in the first half and keeps it; in the second half it goes to
`w`. So nothing is computed twice: together the halves do what the whole backward pass does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autograd.extend import vspace
from autograd.tracer import isbox

from meshdist.arrays.device_types import taken
from meshdist.arrays.trees import Tree
from meshdist.autograd.device_arrays import as_any_array
from meshdist.autograd.tape import Tape, TapeNode, backward, is_differentiable, is_on, recording


class BackwardHalves:
    """The backward pass of one call; made by `run_in_halves`."""

    def __init__(self, tape: Tape, x: _Boxed, parameters: _Boxed, y: Tree) -> None:
        self._tape, self._x, self._parameters, self._y = tape, x, parameters, y
        self._later: list[tuple[TapeNode, Any]] = []  # ends of the second half
        self._unfinished: list[tuple[TapeNode, Any]] = []

    def of_input(self, dy: Any) -> Any:
        """Return the gradient of the input, None if it has no floating or complex arrays.

        Args:
            dy: The gradient of the result, of its structure.

        Raises:
            ValueError: `dy` has not the structure, the dtypes and the shapes of the result.
        """
        gradients = Tree(dy, "dy")
        if gradients.text != self._y.text:
            raise ValueError(f"dy must be like y, {self._y.text}, got {gradients.text}")
        pairs = zip(self._y.leaves, gradients.leaves, strict=True)
        ends = [(y._node, gradient) for y, gradient in pairs if is_on(self._tape, y)]
        self._later = [end for end in ends if not end[0].is_input]
        found: dict[TapeNode, Any] = {}
        first = [end for end in ends if end[0].is_input]
        self._unfinished = backward(self._tape, first, found.__setitem__, is_input=True)
        return self._x.gradients(found) if any(map(isbox, self._x.boxes)) else None

    def of_parameters(self) -> Any:
        """Return the gradients of the parameters, after `of_input`."""
        ends = self._later
        for node, gradient in self._unfinished:
            assert node.others is not None
            parents, vjp = node.others
            ends.extend(zip(parents, vjp(gradient), strict=True))
            node.others = None  # frees the arrays that it kept
        found: dict[TapeNode, Any] = {}
        backward(self._tape, ends, found.__setitem__, is_input=False)
        return self._parameters.gradients(found)


class _Boxed:
    """A tree whose floating and complex leaves are boxes on a tape."""

    def __init__(self, tape: Tape, tree: Tree, is_input: bool) -> None:
        self._tree = tree
        self.boxes = [tape.box(leaf, is_input) if is_differentiable(leaf) else leaf for leaf in tree.leaves]
        self.tree = tree.rebuilt(self.boxes)

    def gradients(self, found: dict[TapeNode, Any]) -> Any:
        """Return the gradients in the structure of the tree, zeros for what was not used."""
        leaves = []
        for box, leaf in zip(self.boxes, self._tree.leaves, strict=True):
            gradient = found.get(box._node) if isbox(box) else None
            leaves.append(
                vspace(leaf).zeros() if gradient is None else as_any_array(gradient).astype(leaf.dtype, copy=False)
            )
        return self._tree.rebuilt(leaves)


def run_in_halves(fun: Callable[..., Any], parameters: Any, x: Any, kw: dict[str, Any]) -> tuple[Any, BackwardHalves]:
    """Return `fun(parameters, x, **kw)`, and its backward pass.

    Args:
        fun: Computes with the functions of `autograd.numpy` and `meshdist.autograd`, and returns a tree of arrays.
        parameters: A tree of floating or complex arrays.
        x: A tree of arrays, floating and complex ones of which have gradients.
        kw: Keyword arguments of `fun`, which are not differentiated.
    """
    with recording() as tape:
        boxed_x = _Boxed(tape, Tree(x, "x"), is_input=True)
        boxed_parameters = _Boxed(tape, Tree(parameters, "parameters"), is_input=False)
        result = Tree(fun(boxed_parameters.tree, boxed_x.tree, **kw), "y", _leaf)
    y = result.rebuilt([leaf._value if is_on(tape, leaf) else leaf for leaf in result.leaves])
    return y, BackwardHalves(tape, boxed_x, boxed_parameters, result)


def _leaf(x: Any, name: str) -> Any:
    return x if isbox(x) else taken(x, name)
