"""A collective with its backward pass as a primitive of autograd, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from autograd.tracer import getval, isbox

from meshdist.arrays.reduce_op import Op, PremulSum, ReduceOp, as_reduce_op
from meshdist.autograd.device_arrays import as_any_array
from meshdist.autograd.tape import communicating
from meshdist.debug.debug_level import DebugLevel, get_debug_level
from meshdist.debug.replicated import check_replicated
from meshdist.groups.process_group import ProcessGroup
from meshdist.tensor.dispatch import NUMBERS

EXTREMES = (ReduceOp.MAX, ReduceOp.MIN)
_SUMS = (ReduceOp.SUM, ReduceOp.AVG)

Function = TypeVar("Function", bound=Callable[..., Any])
_paired: list[Callable[..., Any]] = []


class Wanted:
    """Stands for the array of a call of which `vjp` wants the two functions."""


class Pair(NamedTuple):
    """What `vjp` returns."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


class Collective:
    """A function `forward(x, members, ...)`, and `pull(g, x, y, members, ...)` for the gradient of `x`."""

    def __init__(self, name: str, forward: Callable[..., Any], pull: Callable[..., Any], needs: str = "") -> None:
        def run(x: Any, *bound: Any) -> Any:
            return forward(np.asarray(x) if isinstance(x, (*NUMBERS, np.generic)) else x, *bound)

        run.__name__ = self.name = name
        self._pull, self._needs = pull, needs
        self.primitive = primitive(run)
        defvjp(self.primitive, lambda y, x, *bound: lambda g: self.pull(g, x, y, *bound))
        communicating.add(self.primitive)

    def __call__(self, x: Any, *bound: Any) -> Any:
        if x is not Wanted:
            return self.primitive(x, *bound)

        def backward(g: Any, x: Any = None, y: Any = None) -> Any:
            return self.pull(g, x, y, *bound)

        return Pair(lambda x: self.primitive(x, *bound), backward)

    def pull(self, g: Any, x: Any, y: Any, members: ProcessGroup, *bound: Any) -> Any:
        missing = [name for name, value in (("x", x), ("y", y)) if name in self._needs and value is None]
        if missing and (self.name == "send" or bound[0] in EXTREMES):
            raise ValueError(
                f"{members.error_prefix(self.name)}: its backward pass needs {' and '.join(missing)} of the forward"
                " pass: write backward(g, x, y)"
            )
        if y is not None and self.name != "send":
            check_gradient(members.error_prefix(self.name), g, y)
        return self._pull(g, x, y, members, *bound)


def check_gradient(prefix: str, g: Any, y: Any, what: str = "the result") -> None:
    """Check that `g` can be the gradient of `y`, which messages call `what`.

    Raises:
        TypeError: A gradient of no floating or complex dtype, or a complex one of real numbers.
        ValueError: A gradient of a different shape.
    """
    shape, dtype = np.shape(getval(g)), anp.result_type(g)
    if shape != np.shape(getval(y)):
        raise ValueError(f"{prefix}: the gradient of {what} must have its shape {np.shape(getval(y))}, got {shape}")
    wanted = anp.result_type(y)
    if dtype.kind in "biu" or (dtype.kind == "c" and wanted.kind != "c"):
        raise TypeError(f"{prefix}: the gradient of {what}, of {wanted}, must be of this dtype, got {dtype}")


def with_vjp(collective: Function) -> Function:
    """Let `vjp` take the decorated function, which calls a `Collective` for `Wanted` in place of an array."""
    _paired.append(collective)
    return collective


def vjp(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a collective and its backward pass, for programs that do not use autograd.

    Args:
        collective: One of `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`, `broadcast`, `send`, `permute`
            and `copy` of this module.
        args: Its arguments after the array.
        kwargs: Its keyword arguments.

    Returns:
        Two functions, `forward, backward = vjp(all_reduce, "sum", mesh["tp"])`: `y = forward(x)`, and `backward(g)`
        returns the gradient of `x` from the gradient `g` of `y`, of its shape and dtype. For max and min write
        `backward(g, x, y)`, for `send` `backward(None, x)`.

    Raises:
        TypeError: `collective` is not one of these functions. From `backward`: the gradient has a different kind of
            dtype.
        ValueError: From `backward`: `x` or `y` is needed and missing, or `g` does not have the shape of `y`.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import copy, vjp
        >>> def program():
        ...     forward, backward = vjp(copy)
        ...     return forward(np.ones(2)).tolist(), backward(np.ones(2)).tolist()
        >>> meshdist.run(program, 2)[0]
        ([1.0, 1.0], [2.0, 2.0])
    """
    if collective not in _paired:
        names = ", ".join(function.__name__ for function in _paired)
        raise TypeError(f"vjp: collective must be one of {names} of meshdist.autograd, got {collective!r}")
    pair: Pair = collective(Wanted, *args, **kwargs)
    return pair


# ---- Arguments


def array_of(of: str, members: ProcessGroup, x: Any) -> Any:
    """Return an array, a number or a box of one.

    Raises:
        TypeError: Anything else, such as a list or a DTensor.
    """
    value = getval(x)
    if isinstance(value, (list, tuple, dict, str)) or value is None:
        raise TypeError(
            f"{members.error_prefix(of)}: x must be an array, got a {type(value).__name__}; call it for each array"
        )
    if hasattr(value, "placements"):
        raise TypeError(f"{members.error_prefix(of)}: x is a DTensor; write x.redistribute(...), or x.to_local()")
    return x if isbox(x) or not isinstance(value, NUMBERS) else np.asarray(value)


def reduction_of(of: str, members: ProcessGroup, op: Op) -> Any:
    """Return the ReduceOp, or the PremulSum.

    Raises:
        TypeError: A reduction without a gradient.
    """
    if isinstance(op, PremulSum):
        return op
    known = as_reduce_op(op)
    if known not in (*_SUMS, *EXTREMES):
        raise TypeError(
            f"{members.error_prefix(of)}: op {known.value!r} has no gradient here; use sum, avg, max, min or"
            f" premul_sum, or meshdist.functional.{of} outside of the differentiated function"
        )
    return known


def check_invariant(of: str, members: ProcessGroup, g: Any) -> None:
    """With the debug level DETAIL, check that all ranks have the gradient that grad="identity" takes them to have."""
    value = getval(g)
    if isbox(value) or get_debug_level() is not DebugLevel.DETAIL:
        return
    check_replicated(
        as_any_array(value),
        members,
        f"the gradient of the result of {of} (grad='identity': ranks that use the result each for its own part have to"
        " add their gradients, by grad='reduce', or by copy before such a use)",
    )
