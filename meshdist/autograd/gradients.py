"""grad and value_and_grad: of functions of trees of DTensors and plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from operator import index
from typing import Any

import numpy as np
from autograd.extend import vspace
from autograd.tracer import getval, isbox

from meshdist.arrays.device_types import taken
from meshdist.arrays.trees import Tree
from meshdist.autograd.pending_gradients import PendingGradients, check_same_trees
from meshdist.autograd.tape import TapeNode, backward, is_on, recording
from meshdist.tensor.dispatch import implicit_redistribution
from meshdist.tensor.dtensor import DTensor

Argnum = int | Sequence[int]


def grad(fun: Callable[..., Any], argnum: Argnum = 0) -> Callable[..., Any]:
    """Return a function of the arguments of `fun` that returns the gradient of `fun`; see `value_and_grad`.

    Args:
        fun: The function to differentiate, as in `value_and_grad`.
        argnum: The positional argument, or several, with respect to which it is differentiated.

    Raises:
        TypeError: An argument is an integer array, `fun` returned no real number, or an operation has no gradient.
        ValueError: `fun` returned an array of several numbers.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import grad
        >>> from meshdist.tensor import Shard, distribute_tensor
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = distribute_tensor(np.arange(6.0).reshape(3, 2), mesh, {"dp": Shard(0)})
        ...     return grad(lambda w: np.sum((x @ w) ** 2))(np.ones(2)).tolist()
        >>> meshdist.run(program, 2)
        [[92.0, 122.0], [92.0, 122.0]]
    """
    differentiated = value_and_grad(fun, argnum)

    @wraps(fun, assigned=("__doc__", "__name__"))
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return differentiated(*args, **kwargs)[1]

    return gradient


def value_and_grad(fun: Callable[..., Any], argnum: Argnum = 0) -> Callable[..., tuple[Any, Any]]:
    """Return a function of the arguments of `fun` that returns its value and its gradient.

    A gradient has the shape and the dtype of its argument; for a DTensor also the placements (Replicate() if a sum is
    pending). The sums of gradients that are pending at the end of the backward pass are computed together. The backward
    pass calls its collectives in the reverse order of the calls of `fun`.

    Args:
        fun: Returns one real number: a DTensor, the same on every mesh, or an array, as each rank computes it. It
            computes with the functions of `autograd.numpy` and of this module; with DTensors also with those of NumPy.
        argnum: The positional argument, or several, with respect to which `fun` is differentiated. An argument is an
            array, a DTensor, a number, or nested lists, tuples (named ones too) and dicts of them, of floating or
            complex dtypes.

    Returns:
        A function that returns the value of `fun` and the gradient, which has the structure of the argument; for
        several arguments, a tuple of gradients.

    Raises:
        TypeError: The function was called with an integer array, or `fun` returned no real number; or an operation has
            no gradient.
        ValueError: `fun` returned an array of several numbers.
        DistBackendError: The ranks differentiate by DTensors of different trees, shapes or dtypes.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import value_and_grad
        >>> from meshdist.tensor import Shard, distribute_tensor
        >>> def loss(params, x):
        ...     return np.mean((x @ params["w"] + params["b"]) ** 2)
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     params = {"w": distribute_tensor(np.eye(2), mesh, {"tp": Shard(1)}), "b": np.zeros(2)}
        ...     value, gradient = value_and_grad(loss)(params, np.ones((4, 2)))
        ...     return float(value), gradient["w"].placements, gradient["b"].tolist()
        >>> meshdist.run(program, 2)[0]
        (1.0, (Shard(1),), [1.0, 1.0])
    """
    argnums = (argnum,) if isinstance(argnum, int) else tuple(map(index, argnum))

    @wraps(fun, assigned=("__doc__", "__name__"))
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not all(-len(args) <= number < len(args) for number in argnums):
            raise TypeError(f"grad: argnum is {argnum}, and {len(args)} positional arguments are given")
        trees = [Tree(args[number], _name(fun, number), _leaf) for number in argnums]
        _check_leaves(trees)
        check_same_trees(trees)
        value, gradients = _differentiate(fun, args, kwargs, argnums, trees)
        rebuilt = [tree.rebuilt(gradients[at]) for at, tree in enumerate(trees)]
        return value, rebuilt[0] if isinstance(argnum, int) else tuple(rebuilt)

    return differentiated


def _name(fun: Callable[..., Any], number: int) -> str:
    code = getattr(fun, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return names[number] if -len(names) <= number < len(names) else f"argument {number}"


def _leaf(x: Any, name: str) -> Any:
    return x if isinstance(x, DTensor) or isbox(x) else taken(x, name)


def _check_leaves(trees: Sequence[Tree]) -> None:
    for tree in trees:
        for leaf, name in zip(tree.leaves, tree.names, strict=True):
            if np.dtype(leaf.dtype).kind in "biu":
                raise TypeError(
                    f"grad: {name} has dtype {leaf.dtype}, and only floating-point and complex arrays have gradients;"
                    f" write {name}.astype(float), or pass it as an argument that is not differentiated"
                )


def _differentiate(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Sequence[int], trees: list[Tree]
) -> tuple[Any, list[list[Any]]]:
    given = list(args)
    with recording() as tape:
        boxes = [[tape.box(leaf) for leaf in tree.leaves] for tree in trees]
        for number, tree, boxed in zip(argnums, trees, boxes, strict=True):
            given[number] = tree.rebuilt(boxed)
        result = fun(*given, **kwargs)
    value, end = (result._value, result._node) if is_on(tape, result) else (result, None)
    seed, value = _seed(value)
    pending = PendingGradients()
    places: dict[TapeNode, tuple[int, int]] = {
        box._node: (at, leaf) for at, boxed in enumerate(boxes) for leaf, box in enumerate(boxed)
    }

    def finished(node: TapeNode, gradient: Any) -> None:
        place = places.get(node)
        if place is not None:
            at, leaf = place
            pending.add(place, trees[at].leaves[leaf], trees[at].names[leaf], gradient)

    with implicit_redistribution():
        backward(tape, [] if end is None else [(end, seed)], finished)
        found = pending.resolve()
    zeros = [
        [found[at, leaf] if (at, leaf) in found else vspace(value).zeros() for leaf, value in enumerate(tree.leaves)]
        for at, tree in enumerate(trees)
    ]
    return value, zeros


def _seed(value: Any) -> tuple[Any, Any]:
    """Return the gradient of the value by itself, and the value, a pending sum of which is computed.

    Raises:
        TypeError: No real number.
        ValueError: Several numbers.
    """
    plain = getval(value)
    if isinstance(plain, (list, tuple, dict, str)) or plain is None:
        raise TypeError(f"grad: the function must return one number, and it returned a {type(plain).__name__}")
    if np.size(plain) != 1:
        raise ValueError(
            f"grad: the function must return one number, and it returned an array of shape {np.shape(plain)}; add its"
            " elements, by np.sum"
        )
    dtype = plain.dtype if hasattr(plain, "dtype") else np.asarray(plain).dtype
    if dtype.kind == "c":
        raise TypeError("grad: the function must return a real number, and it returned a complex one; take np.real")
    if dtype.kind in "biu":
        plain = value = value * 1.0
    return vspace(plain).ones(), value.redistribute() if isinstance(value, DTensor) else value
