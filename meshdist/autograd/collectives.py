"""Collectives on plain arrays as differentiable functions.

Each rank differentiates its own program, so the gradient of an array says what the array means. There are four cases,
and a collective leads from one to another; its backward pass leads back:

    Replicate    all ranks hold the same, and each uses it for its own part: its gradient is Partial
    Partial      the ranks hold the terms of a sum: its gradient is Replicate
    Invariant    all ranks hold the same and do the same with it: its gradient is Invariant
    Varying      each rank holds its own: its gradient is Varying

A collective whose result may be Replicate or Invariant takes `grad=`: "reduce" for Replicate, which adds the gradients
of all ranks, and "identity" for Invariant, which does not, since each rank has the whole gradient already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from autograd.tracer import getval, isbox

from meshdist import functional
from meshdist.arrays.reduce_op import Op, PremulSum, ReduceOp, as_reduce_op
from meshdist.autograd.tape import communicating, current_tape, is_on
from meshdist.collectives.dimensions import dimension
from meshdist.collectives.send_recv import recv as _recv_into
from meshdist.collectives.send_recv import send as _send_from
from meshdist.collectives.send_recv import sendrecv as _sendrecv
from meshdist.debug.debug_level import DebugLevel, get_debug_level
from meshdist.debug.replicated import check_replicated
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike

GRADS = ("reduce", "identity")
NUMBERS = (bool, int, float, complex)
_SUMS = (ReduceOp.SUM, ReduceOp.AVG)
_EXTREMES = (ReduceOp.MAX, ReduceOp.MIN)


# ---- A collective and its backward pass


class _Wanted:
    """Stands for the array of a call of which `vjp` wants the two functions."""


class _Pair(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


class _Collective:
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
        if x is not _Wanted:
            return self.primitive(x, *bound)

        def backward(g: Any, x: Any = None, y: Any = None) -> Any:
            return self.pull(g, x, y, *bound)

        return _Pair(lambda x: self.primitive(x, *bound), backward)

    def pull(self, g: Any, x: Any, y: Any, members: ProcessGroup, *bound: Any) -> Any:
        missing = [name for name, value in (("x", x), ("y", y)) if name in self._needs and value is None]
        if missing and (self.name == "send" or bound[0] in _EXTREMES):
            raise ValueError(
                f"{members.error_prefix(self.name)}: its backward pass needs {' and '.join(missing)} of the forward"
                " pass: write backward(g, x, y)"
            )
        if y is not None and self.name != "send":
            check_gradient(members.error_prefix(self.name), g, y)
        return self._pull(g, x, y, members, *bound)


def check_gradient(prefix: str, g: Any, y: Any) -> None:
    """Check that `g` can be the gradient of `y`.

    Raises:
        TypeError: A gradient of no floating or complex dtype, or a complex one of real numbers.
        ValueError: A gradient of another shape.
    """
    shape, dtype = np.shape(getval(g)), anp.result_type(g)
    if shape != np.shape(getval(y)):
        raise ValueError(f"{prefix}: the gradient of the result must have its shape {np.shape(getval(y))}, got {shape}")
    wanted = anp.result_type(y)
    if dtype.kind in "biu" or (dtype.kind == "c" and wanted.kind != "c"):
        raise TypeError(f"{prefix}: the gradient of a result of {wanted} must be of this dtype, got {dtype}")


def vjp(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a collective and its backward pass, for programs that do without autograd.

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
        TypeError: Not one of these functions; from `backward`, a gradient of another kind of dtype.
        ValueError: From `backward`: `x` or `y` is needed and missing, or `g` has not the shape of `y`.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import copy, vjp
        >>> def program():
        ...     forward, backward = vjp(copy)
        ...     return forward(np.ones(2)).tolist(), backward(np.ones(2)).tolist()
        >>> meshdist.run(program, 2)[0]
        ([1.0, 1.0], [2.0, 2.0])
    """
    known = (all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send, permute, copy)
    if collective not in known:
        names = ", ".join(function.__name__ for function in known)
        raise TypeError(f"vjp: collective must be one of {names} of meshdist.autograd, got {collective!r}")
    pair: _Pair = collective(_Wanted, *args, **kwargs)
    return pair


# ---- Arguments


def _array(of: str, members: ProcessGroup, x: Any) -> Any:
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


def _choice(of: str, members: ProcessGroup, grad: str) -> str:
    if grad not in GRADS:
        raise ValueError(f"{members.error_prefix(of)}: grad must be 'reduce' or 'identity', got {grad!r}")
    return grad


def _reduction(of: str, members: ProcessGroup, op: Op) -> Any:
    """Return the ReduceOp, or the PremulSum.

    Raises:
        TypeError: A reduction without a gradient.
    """
    if isinstance(op, PremulSum):
        return op
    known = as_reduce_op(op)
    if known not in (*_SUMS, *_EXTREMES):
        raise TypeError(
            f"{members.error_prefix(of)}: op {known.value!r} has no gradient here; use sum, avg, max, min or"
            f" premul_sum, or meshdist.functional.{of} outside of what is differentiated"
        )
    return known


def _check_invariant(of: str, members: ProcessGroup, g: Any) -> None:
    """With the debug level DETAIL, check that all ranks have the gradient that grad="identity" takes them to have."""
    value = getval(g)
    if isbox(value) or get_debug_level() is not DebugLevel.DETAIL:
        return
    check_replicated(
        np.asarray(value),
        members,
        f"the gradient of the result of {of} (grad='identity': ranks that use the result each for its own part have to"
        " add their gradients, by grad='reduce', or by copy before such a use)",
    )


# ---- all_reduce, and copy, which is the other way round


def _pull_all_reduce(g: Any, x: Any, y: Any, members: ProcessGroup, op: Any, grad: str) -> Any:
    if grad == "identity":
        _check_invariant("all_reduce", members, g)
    if op is ReduceOp.AVG:
        return all_reduce(g, op, members, grad=grad) if grad == "reduce" else g / members.size()
    total = all_reduce(g, ReduceOp.SUM, members, grad=grad) if grad == "reduce" else g
    if isinstance(op, PremulSum):
        return total * anp.conj(op.factor) if np.iscomplexobj(op.factor) else total * op.factor.astype(_dtype(g))
    return total if op is ReduceOp.SUM else total * _share(x, y, members)


def _share(x: Any, y: Any, members: ProcessGroup) -> Any:
    """Return this rank's share of the gradient of a maximum or minimum: ranks that tie have equal ones."""
    held = np.asarray(getval(x) == getval(y), _dtype(y))
    return held / functional.all_reduce(held, ReduceOp.SUM, members)


def _dtype(x: Any) -> Any:
    return anp.result_type(x)


_ALL_REDUCE = _Collective(
    "all_reduce", lambda x, members, op, grad: functional.all_reduce(x, op, members), _pull_all_reduce, "xy"
)


def all_reduce(x: Any, op: Op = ReduceOp.SUM, group: GroupLike = None, *, grad: str = "identity") -> Any:
    """Return the reduction of `x` over the group, on all ranks. Megatron's g, where grad is "identity".

    Args:
        x: An array, of one shape and dtype on all ranks, or a number.
        op: "sum", "avg", "max", "min", or a `premul_sum`. The gradient of a maximum or minimum goes to the rank that
            has it; ranks that tie get equal shares, for each element.
        group: A ProcessGroup or a DeviceMesh, such as `mesh["tp"]`; the world if None.
        grad: The gradient of `x`. "identity": the gradient of the result, which is the same on all ranks (Partial to
            Invariant); sends nothing. "reduce": the sum over the ranks of their gradients of the result (Partial to
            Replicate); an all_reduce.

    Raises:
        TypeError: No array or number, or an op without a gradient.
        ValueError: Another `grad`.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import all_reduce, grad
        >>> def program():
        ...     x = np.array([1.0 + meshdist.get_rank(), 2.0])
        ...     return grad(lambda x: all_reduce((x**2).sum()))(x).tolist()
        >>> meshdist.run(program, 2)
        [[2.0, 4.0], [4.0, 4.0]]
    """
    members = resolve(group)
    x = x if x is _Wanted else _array("all_reduce", members, x)
    return _ALL_REDUCE(x, members, _reduction("all_reduce", members, op), _choice("all_reduce", members, grad))


_COPY = _Collective(
    "copy", lambda x, members: np.array(x), lambda g, x, y, members: all_reduce(g, ReduceOp.SUM, members)
)


def copy(x: Any, group: GroupLike = None) -> Any:
    """Return a copy of `x`, whose gradient is the sum of those of all ranks. Megatron's f; sends nothing itself.

    `x` is the same on all ranks and each uses it for its own part, as the input of a layer whose weight is cut by
    columns (Invariant to Replicate).

    Args:
        x: An array or a number.
        group: As in `all_reduce`.

    Raises:
        TypeError: No array or number.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import all_reduce, copy, grad
        >>> def program():
        ...     own = 1.0 + meshdist.get_rank()
        ...     return float(grad(lambda x: all_reduce(own * copy(x)))(2.0))
        >>> meshdist.run(program, 2)
        [3.0, 3.0]
    """
    members = resolve(group)
    return _COPY(x if x is _Wanted else _array("copy", members, x), members)


# ---- all_gather and reduce_scatter


def _own_block(x: Any, members: ProcessGroup, place: int) -> Any:
    """Return this rank's block of `x` along dimension `place`, of equal blocks."""
    rows = x.shape[place] // members.size()
    return x[(slice(None),) * place + (slice(rows * members.rank(), rows * (members.rank() + 1)),)].copy()


def _gathered(x: Any, members: ProcessGroup, axis: int | None, dim: int | None, grad: str) -> Any:
    return functional.all_gather_into_tensor(x, members, axis=axis, dim=dim)


def _pull_all_gather(
    g: Any, x: Any, y: Any, members: ProcessGroup, axis: int | None, dim: int | None, grad: str
) -> Any:
    place = dimension(members, "all_gather", getval(g), axis, dim)
    if grad == "reduce":
        block = reduce_scatter(g, ReduceOp.SUM, members, axis=place)
    else:
        _check_invariant("all_gather", members, g)
        block = _OWN_BLOCK(g, members, place)
    # A number is gathered as if it were an array of one row.
    return block[0] if x is not None and np.shape(getval(x)) == () else block


_ALL_GATHER = _Collective("all_gather", _gathered, _pull_all_gather)
_OWN_BLOCK = _Collective(
    "own_block",
    _own_block,
    lambda g, x, y, members, place: all_gather(g, members, axis=place, grad="identity"),
)


def all_gather(
    x: Any, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None, grad: str = "reduce"
) -> Any:
    """Return the arrays of all ranks, which have the shape of `x`: as a list, or concatenated along `axis`.

    Args:
        x: An array, of one shape and dtype on all ranks. 0-d ones are stacked.
        group: As in `all_reduce`.
        axis: The dimension along which they are concatenated. None: they are a list in rank order.
        dim: The same, by torch's name.
        grad: The gradient of `x`. "reduce": the sum over the ranks of their gradients of its block (Varying to
            Replicate); a reduce_scatter. "identity": this rank's block of the gradient of the result, which is the same
            on all ranks (Varying to Invariant); sends nothing.

    Raises:
        TypeError: No array or number.
        ValueError: `x` has no such dimension, both `axis` and `dim` are given, or another `grad`.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import all_gather, grad
        >>> def program():
        ...     x, own = np.ones(1), 1.0 + meshdist.get_rank()
        ...     return grad(lambda x: (own * all_gather(x, axis=0)).sum())(x).tolist()
        >>> meshdist.run(program, 2)
        [[3.0], [3.0]]
    """
    members = resolve(group)
    choice = _choice("all_gather", members, grad)
    if x is _Wanted:
        return _ALL_GATHER(x, members, axis, dim, choice)
    x = _array("all_gather", members, x)
    if axis is None and dim is None:
        stack = _ALL_GATHER(anp.reshape(x, (1, *anp.shape(x))), members, 0, None, choice)
        return [stack[rank] for rank in range(members.size())]
    return _ALL_GATHER(x, members, axis, dim, choice)


def _scattered(x: Any, members: ProcessGroup, op: Any, axis: int | None, dim: int | None) -> Any:
    return functional.reduce_scatter_tensor(x, op, members, axis=axis, dim=dim)


def _pull_reduce_scatter(
    g: Any, x: Any, y: Any, members: ProcessGroup, op: Any, axis: int | None, dim: int | None
) -> Any:
    place = dimension(members, "reduce_scatter", getval(g), axis, dim)
    whole = all_gather(g, members, axis=place)
    if op is ReduceOp.AVG:
        return whole / members.size()
    if isinstance(op, PremulSum):
        return whole * anp.conj(op.factor) if np.iscomplexobj(op.factor) else whole * op.factor.astype(_dtype(g))
    if op is ReduceOp.SUM:
        return whole
    result = functional.all_gather_into_tensor(np.asarray(getval(y)), members, axis=place)
    return whole * _share(x, result, members)


_REDUCE_SCATTER = _Collective("reduce_scatter", _scattered, _pull_reduce_scatter, "xy")


def reduce_scatter(
    x: Any, op: Op = ReduceOp.SUM, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None
) -> Any:
    """Return this rank's block of the reduction of `x` over the group.

    The gradient of `x` is gathered from those of all blocks (Partial to Varying), by an all_gather.

    Args:
        x: An array, of one shape and dtype on all ranks, which is cut into equal blocks; or a list of an array for each
            rank, all of one shape.
        op: As in `all_reduce`.
        group: As in `all_reduce`.
        axis: The dimension along which an array is cut. None: dimension 0.
        dim: The same, by torch's name.

    Raises:
        TypeError: No array, or an op without a gradient.
        ValueError: That dimension is missing or no multiple of the group's size, both `axis` and `dim` are given, or a
            list of another length or of arrays of several shapes.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import grad, reduce_scatter
        >>> def program():
        ...     x, own = np.ones(2), 1.0 + meshdist.get_rank()
        ...     return grad(lambda x: (own * reduce_scatter(x)).sum())(x).tolist()
        >>> meshdist.run(program, 2)
        [[1.0, 2.0], [1.0, 2.0]]
    """
    members = resolve(group)
    reduction = _reduction("reduce_scatter", members, op)
    if isinstance(x, (list, tuple)):
        _check_list("reduce_scatter", members, x)
        if len({anp.shape(block) for block in x}) > 1:
            raise ValueError(f"{members.error_prefix('reduce_scatter')}: the arrays of x must have one shape")
        return _REDUCE_SCATTER(anp.stack(x), members, reduction, 0, None)[0]
    x = x if x is _Wanted else _array("reduce_scatter", members, x)
    return _REDUCE_SCATTER(x, members, reduction, axis, dim)


def _check_list(of: str, members: ProcessGroup, x: Sequence[Any]) -> None:
    if len(x) != members.size():
        raise ValueError(
            f"{members.error_prefix(of)}: x must hold an array for each of {members.size()} ranks, got {len(x)}"
        )


# ---- all_to_all


def _exchanged(x: Any, members: ProcessGroup, out_sizes: Any, in_sizes: Any, axis: int | None, dim: int | None) -> Any:
    return functional.all_to_all_single(x, out_sizes, in_sizes, members, axis=axis, dim=dim)


_ALL_TO_ALL = _Collective(
    "all_to_all",
    _exchanged,
    lambda g, x, y, members, out_sizes, in_sizes, axis, dim: all_to_all(
        g, members, output_split_sizes=in_sizes, input_split_sizes=out_sizes, axis=axis, dim=dim
    ),
)


def all_to_all(
    x: Any,
    group: GroupLike = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    axis: int | None = None,
    dim: int | None = None,
) -> Any:
    """Send a block of `x` to each rank, and return the blocks that the ranks send to this one.

    The gradients of the blocks go the way back (Varying to Varying), by an all_to_all.

    Args:
        x: An array that is cut, and whose blocks are concatenated, along `axis`; or a list of an array for each rank,
            and then a list is returned. The array from rank i has the shape of `x[i]`.
        group: As in `all_reduce`.
        output_split_sizes: The rows of the block from each rank. None: equal blocks.
        input_split_sizes: The rows of the block for each rank. None: equal blocks.
        axis: The dimension. None: dimension 0.
        dim: The same, by torch's name.

    Raises:
        TypeError: No array.
        ValueError: That dimension is missing, both `axis` and `dim` are given, or the blocks do not fit; a list of
            another length than the group's size.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import all_to_all, grad
        >>> def program():
        ...     x, own = np.ones(2), 1.0 + meshdist.get_rank()
        ...     return grad(lambda x: (own * all_to_all(x)).sum())(x).tolist()
        >>> meshdist.run(program, 2)
        [[1.0, 2.0], [1.0, 2.0]]
    """
    members = resolve(group)
    if isinstance(x, (list, tuple)):
        _check_list("all_to_all", members, x)
        shapes = [anp.shape(block) for block in x]
        sizes = [int(np.prod(shape)) for shape in shapes]
        flat = _ALL_TO_ALL(anp.concatenate([anp.ravel(block) for block in x]), members, sizes, sizes, 0, None)
        ends = np.cumsum(sizes)
        return [
            anp.reshape(flat[end - size : end], shape) for shape, size, end in zip(shapes, sizes, ends, strict=True)
        ]
    x = x if x is _Wanted else _array("all_to_all", members, x)
    return _ALL_TO_ALL(x, members, output_split_sizes, input_split_sizes, axis, dim)


# ---- broadcast, and the two ways back


def _only_on(x: Any, members: ProcessGroup, root: int) -> Any:
    return np.array(x) if members.rank() == root else np.zeros_like(x)


def _reduced_to(x: Any, members: ProcessGroup, root: int) -> Any:
    total = functional.reduce(x, group=members, group_dst=root)
    return total if members.rank() == root else np.zeros_like(total)


def _pull_broadcast(g: Any, x: Any, y: Any, members: ProcessGroup, root: int, grad: str) -> Any:
    if grad == "reduce":
        return _REDUCED_TO(g, members, root)
    _check_invariant("broadcast", members, g)
    return _ONLY_ON(g, members, root)


_BROADCAST = _Collective(
    "broadcast",
    lambda x, members, root, grad: functional.broadcast(x, group=members, group_src=root),
    _pull_broadcast,
)
_REDUCED_TO = _Collective("reduce", _reduced_to, lambda g, x, y, members, root: _BROADCAST(g, members, root, "reduce"))
_ONLY_ON = _Collective("broadcast", _only_on, lambda g, x, y, members, root: _BROADCAST(g, members, root, "identity"))


def broadcast(
    x: Any, src: int | None = None, group: GroupLike = None, group_src: int | None = None, *, grad: str = "reduce"
) -> Any:
    """Return the array of the rank `src`; elsewhere `x` gives its shape and dtype, and has a gradient of zeros.

    Args:
        x: An array or a number.
        src: Global rank of the sender.
        group: As in `all_reduce`.
        group_src: The sender's rank in the group, instead of `src`.
        grad: The gradient of `x` on `src`. "reduce": the sum of the gradients of all ranks (to Replicate); a reduce.
            "identity": its own gradient of the result, which is the same on all ranks (to Invariant); sends nothing.

    Raises:
        TypeError: No array or number.
        ValueError: No or two senders, one that is no member, or another `grad`.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import broadcast, grad
        >>> def program():
        ...     own = 1.0 + meshdist.get_rank()
        ...     return float(grad(lambda x: own * broadcast(x, src=0))(2.0))
        >>> meshdist.run(program, 2)
        [3.0, 0.0]
    """
    members = resolve(group)
    root = members.root("broadcast", "src", src, group_src)
    x = x if x is _Wanted else _array("broadcast", members, x)
    return _BROADCAST(x, members, root, _choice("broadcast", members, grad))


# ---- Messages


def _permuted(x: Any, members: ProcessGroup, to: int | None, by: int | None) -> Any:
    block = np.ascontiguousarray(x).reshape(np.shape(x))
    if to is not None and by is not None:
        taken = np.empty_like(block)
        _sendrecv(block, taken, group=members, group_dst=to, group_src=by)
        return taken
    if to is not None:
        _send_from(block, group=members, group_dst=to)
        return np.zeros_like(block)
    taken = np.zeros_like(block)
    if by is not None:
        _recv_into(taken, group=members, group_src=by)
    return taken


def _pull_permute(g: Any, x: Any, y: Any, members: ProcessGroup, to: int | None, by: int | None) -> Any:
    return _PERMUTE(g, members, by, to)


_PERMUTE = _Collective("permute", _permuted, _pull_permute)


def permute(x: Any, perm: int | Sequence[tuple[int, int]], group: GroupLike = None) -> Any:
    """Send `x` to one rank and return the array of another; zeros on a rank that no other sends to.

    The gradient of `x` comes back from the rank that has it (Varying to Varying), by the messages the other way round.

    Args:
        x: An array, of one shape and dtype on all ranks.
        perm: Pairs (source, destination) of ranks in the group, the same on all ranks; each at most once a source and
            once a destination. Or an integer: each rank sends to the one so many places after it, around the ring.
        group: As in `all_reduce`.

    Raises:
        TypeError: No array, or no pairs of integers.
        ValueError: A rank outside the group, or twice a source or a destination.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import grad, permute
        >>> def program():
        ...     own = 1.0 + meshdist.get_rank()
        ...     return float(permute(own, 1)), float(grad(lambda x: own * permute(x, [(0, 1)]))(own))
        >>> meshdist.run(program, 3)
        [(3.0, 2.0), (1.0, 0.0), (2.0, 0.0)]
    """
    members = resolve(group)
    size, rank = members.size(), members.rank()
    if isinstance(perm, (list, tuple)):
        to, by = _partners(members, perm)
    else:
        shift = _rank_number(members, perm)
        to, by = (rank + shift) % size, (rank - shift) % size
    x = x if x is _Wanted else _array("permute", members, x)
    return _PERMUTE(x, members, to, by)


def _partners(members: ProcessGroup, perm: Sequence[tuple[int, int]]) -> tuple[int | None, int | None]:
    """Return the rank that this one sends to, and the one that sends to it."""
    prefix = members.error_prefix("permute")
    if any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in perm):
        raise TypeError(f"{prefix}: perm must be pairs (source, destination), or an integer, got {perm!r}")
    pairs = [(_rank_number(members, source), _rank_number(members, to)) for source, to in perm]
    for number, what in enumerate(("source", "destination")):
        ranks = [pair[number] for pair in pairs]
        wrong = [rank for rank in ranks if not 0 <= rank < members.size()]
        if wrong:
            raise ValueError(f"{prefix}: ranks must be 0 to {members.size() - 1}, got {wrong[0]} in {perm!r}")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"{prefix}: each rank can be a {what} once, got {perm!r}")
    mine = members.rank()
    return dict(pairs).get(mine), {to: source for source, to in pairs}.get(mine)


def _rank_number(members: ProcessGroup, value: Any) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(
            f"{members.error_prefix('permute')}: perm must be pairs of ranks, or an integer, got {value!r}"
        ) from None


def _has_gradient(x: Any) -> bool:
    return bool(anp.result_type(x).kind in "fc")  # the same where it is sent and where it is received


def _sent(x: Any, members: ProcessGroup, to: int, tag: int) -> Any:
    block = np.ascontiguousarray(x).reshape(np.shape(x))
    _send_from(block, group=members, group_dst=to, tag=tag)
    return np.zeros((), block.dtype)


def _pull_send(g: Any, x: Any, y: Any, members: ProcessGroup, to: int, tag: int) -> Any:
    del g, y  # the receiver has the gradient
    value = np.asarray(getval(x))
    return _RECV(None, members, to, tag, value.shape, value.dtype)


_SEND = _Collective("send", _sent, _pull_send, "x")


def _received(anchor: Any, members: ProcessGroup, by: int, tag: int, shape: Any, dtype: Any) -> Any:
    del anchor
    taken = np.empty(shape, dtype)
    _recv_into(taken, group=members, group_src=by, tag=tag)
    return taken


def _pull_recv(g: Any, anchor: Any, y: Any, members: ProcessGroup, by: int, tag: int, *array: Any) -> Any:
    _SEND(anp.array(g, dtype=array[1]), members, by, tag)
    return np.zeros_like(getval(anchor))


_RECV = _Collective("recv", _received, _pull_recv)


def _sent_undifferentiated(anchor: Any, x: Any, members: ProcessGroup, to: int, tag: int) -> Any:
    del anchor
    return _sent(x, members, to, tag)


def _discard(g: Any, anchor: Any, y: Any, x: Any, members: ProcessGroup, to: int, tag: int) -> Any:
    _pull_send(None, x, None, members, to, tag)
    return np.zeros_like(getval(anchor))


# Of what is not differentiated here, but may be so where it is received.
_SEND_ALONG = primitive(_sent_undifferentiated)
_SEND_ALONG.__name__ = "send"
communicating.add(_SEND_ALONG)
defvjp(_SEND_ALONG, lambda y, anchor, *bound: lambda g: _discard(g, anchor, y, *bound))


def send(x: Any, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None) -> Any:
    """Send `x` to a rank that calls `recv`; the backward pass receives its gradient from there.

    Both ranks are to be differentiated by `grad` or `value_and_grad` of this module, or neither: they run the backward
    passes of messages even where the loss of a rank does not depend on them. First derivatives only.

    Args:
        x: An array or a number.
        dst: Global rank of the receiver.
        group: As in `all_reduce`.
        tag: Matches this message with a `recv` of the same tag.
        group_dst: The receiver's rank in the group, instead of `dst`.

    Returns:
        Zero, of the dtype of `x`: with the package autograd's own `grad`, add it to the loss.

    Raises:
        TypeError: No array or number.
        ValueError: No or two receivers, or one that is no member.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import grad, recv, send
        >>> def program():
        ...     if meshdist.get_rank() == 0:
        ...         return float(grad(lambda x: send(x * x, dst=1))(3.0))
        ...     return float(grad(lambda w: w * recv(0.0, src=0))(2.0))
        >>> meshdist.run(program, 2)
        [12.0, 9.0]
    """
    members = resolve(group)
    to = members.messages.peer("send", "dst", dst, group_dst)
    if x is _Wanted:
        return _SEND(x, members, to, tag)
    x, tape = _array("send", members, x), current_tape()
    if tape is None or not _has_gradient(x) or is_on(tape, x):
        return _SEND(x, members, to, tag)
    return _SEND_ALONG(tape.anchor, x, members, to, tag)


def recv(x: Any, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None) -> Any:
    """Return the array that a rank sends to this one with `send`; the backward pass sends its gradient there.

    Args:
        x: An array or a number of the shape and dtype that are sent. It has a gradient of zeros.
        src: Global rank of the sender.
        group: As in `all_reduce`.
        tag: The tag it was sent with.
        group_src: The sender's rank in the group, instead of `src`.

    Raises:
        TypeError: No array or number.
        ValueError: No or two senders, or one that is no member.
    """
    members = resolve(group)
    by = members.root("recv", "src", src, group_src)
    x, tape = _array("recv", members, x), current_tape()
    value = np.asarray(getval(x))
    anchor = x if tape is None or not _has_gradient(x) or is_on(tape, x) else tape.anchor
    return _RECV(anchor, members, by, tag, value.shape, value.dtype)
