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

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from meshdist import functional
from meshdist.arrays.host import AnyArray
from meshdist.arrays.reduce_op import Op, PremulSum, ReduceOp
from meshdist.autograd.array_moves import checked_grad
from meshdist.autograd.collective_primitives import (
    Collective,
    Pair,
    Wanted,
    array_of,
    check_invariant,
    reduction_of,
    with_vjp,
)
from meshdist.autograd.device_arrays import as_any_array
from meshdist.collectives.dimensions import dimension
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike

# ---- all_reduce, and copy, which is the other way round


def _pull_all_reduce(g: Any, x: Any, y: Any, members: ProcessGroup, op: Any, grad: str) -> Any:
    if grad == "identity":
        check_invariant("all_reduce", members, g)
        g = copy(g, members) if isbox(g) else g  # of second derivatives: each rank uses it for its own term
    if op is ReduceOp.AVG:
        return all_reduce(g, op, members, grad=grad) if grad == "reduce" else g / members.size()
    total = all_reduce(g, ReduceOp.SUM, members, grad=grad) if grad == "reduce" else g
    if isinstance(op, PremulSum):
        return total * anp.conj(op.factor) if np.iscomplexobj(op.factor) else total * op.factor.astype(_dtype(g))
    return total if op is ReduceOp.SUM else total * _share(x, y, members)


def _share(x: Any, y: Any, members: ProcessGroup) -> Any:
    """Return this rank's share of the gradient of a maximum or minimum: ranks that tie have equal ones."""
    held = as_any_array(np.equal(getval(x), getval(y))).astype(_dtype(y))
    with np.errstate(invalid="ignore"):  # of a NaN, which no rank equals, the shares are NaN
        return held / functional.all_reduce(held, ReduceOp.SUM, members)


def _dtype(x: Any) -> Any:
    return anp.result_type(x)


_ALL_REDUCE = Collective(
    "all_reduce", lambda x, members, op, grad: functional.all_reduce(x, op, members), _pull_all_reduce, "xy"
)


@with_vjp
def all_reduce(x: AnyArray, op: Op = ReduceOp.SUM, group: GroupLike = None, *, grad: str = "identity") -> AnyArray:
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
        TypeError: `x` is not an array or a number, or `op` has no gradient.
        ValueError: `grad` is unknown.

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
    x = x if x is Wanted else array_of("all_reduce", members, x)
    return _ALL_REDUCE(
        x, members, reduction_of("all_reduce", members, op), checked_grad(members.error_prefix("all_reduce"), grad)
    )


_COPY = Collective(
    "copy", lambda x, members: as_any_array(x).copy(), lambda g, x, y, members: all_reduce(g, ReduceOp.SUM, members)
)


@with_vjp
def copy(x: AnyArray, group: GroupLike = None) -> AnyArray:
    """Return a copy of `x`, whose gradient is the sum of those of all ranks. Megatron's f; sends nothing itself.

    `x` is the same on all ranks and each uses it for its own part, as the input of a layer whose weight is sharded by
    columns (Invariant to Replicate).

    Args:
        x: An array or a number.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Raises:
        TypeError: `x` is not an array or a number.

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
    return _COPY(x if x is Wanted else array_of("copy", members, x), members)


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
        check_invariant("all_gather", members, g)
        block = _OWN_BLOCK(g, members, place)
    # A number is gathered as if it were an array of one row.
    return block[0] if x is not None and np.shape(getval(x)) == () else block


_ALL_GATHER = Collective("all_gather", _gathered, _pull_all_gather)
_OWN_BLOCK = Collective(
    "own_block",
    _own_block,
    lambda g, x, y, members, place: all_gather(g, members, axis=place, grad="identity"),
)


@with_vjp
def all_gather(
    x: AnyArray, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None, grad: str = "reduce"
) -> Any:
    """Return the arrays of all ranks, which have the shape of `x`: as a list, or concatenated along `axis`.

    Args:
        x: An array, of one shape and dtype on all ranks. 0-d ones are stacked.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        axis: The dimension along which the arrays are concatenated. None: return a list, in rank order.
        dim: The same, by torch's name.
        grad: The gradient of `x`. "reduce": the sum over the ranks of their gradients of its block (Varying to
            Replicate); a reduce_scatter. "identity": this rank's block of the gradient of the result, which is the same
            on all ranks (Varying to Invariant); sends nothing.

    Raises:
        TypeError: `x` is not an array or a number.
        ValueError: `x` has no such dimension, both `axis` and `dim` are given, or `grad` is unknown.

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
    choice = checked_grad(members.error_prefix("all_gather"), grad)
    is_list = axis is None and dim is None
    if x is Wanted:
        pair: Pair = _ALL_GATHER(x, members, axis, dim, choice)
        return _in_lists(pair) if is_list else pair
    x = array_of("all_gather", members, x)
    if is_list:
        stack = _ALL_GATHER(anp.reshape(x, (1, *anp.shape(x))), members, 0, None, choice)
        return [stack[rank] for rank in range(members.size())]
    return _ALL_GATHER(x, members, axis, dim, choice)


def _in_lists(pair: Pair) -> Pair:
    """Return an all_gather of stacked arrays, and its backward pass, as ones of lists of arrays."""
    return Pair(
        lambda x: list(pair.forward(np.reshape(x, (1, *np.shape(x))))),
        lambda g, x=None, y=None: pair.backward(np.stack(g))[0],
    )


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
    result = functional.all_gather_into_tensor(as_any_array(getval(y)), members, axis=place)
    return whole * _share(x, result, members)


_REDUCE_SCATTER = Collective("reduce_scatter", _scattered, _pull_reduce_scatter, "xy")


@with_vjp
def reduce_scatter(
    x: AnyArray, op: Op = ReduceOp.SUM, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None
) -> AnyArray:
    """Return this rank's block of the reduction of `x` over the group.

    The gradient of `x` is gathered from those of all blocks (Partial to Varying), by an all_gather.

    Args:
        x: An array, of one shape and dtype on all ranks, which is split into equal blocks; or a list of an array for
            each rank, all of one shape.
        op: The reduction, as in `all_reduce`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        axis: The dimension along which an array is split. None: dimension 0.
        dim: The same, by torch's name.

    Raises:
        TypeError: `x` is not an array, or `op` has no gradient.
        ValueError: That dimension is missing or not a multiple of the group's size, both `axis` and `dim` are given, or
            a list of a different length or of arrays of several shapes.

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
    reduction = reduction_of("reduce_scatter", members, op)
    if isinstance(x, (list, tuple)):
        _check_list("reduce_scatter", members, x)
        if len({anp.shape(block) for block in x}) > 1:
            raise ValueError(f"{members.error_prefix('reduce_scatter')}: the arrays of x must have one shape")
        return _REDUCE_SCATTER(anp.stack(x), members, reduction, 0, None)[0]
    x = x if x is Wanted else array_of("reduce_scatter", members, x)
    return _REDUCE_SCATTER(x, members, reduction, axis, dim)


def _check_list(of: str, members: ProcessGroup, x: Sequence[Any]) -> None:
    if len(x) != members.size():
        raise ValueError(
            f"{members.error_prefix(of)}: x must hold an array for each rank: expected {members.size()}, got {len(x)}"
        )


# ---- all_to_all


def _exchanged(x: Any, members: ProcessGroup, out_sizes: Any, in_sizes: Any, axis: int | None, dim: int | None) -> Any:
    return functional.all_to_all_single(x, out_sizes, in_sizes, members, axis=axis, dim=dim)


_ALL_TO_ALL = Collective(
    "all_to_all",
    _exchanged,
    lambda g, x, y, members, out_sizes, in_sizes, axis, dim: all_to_all(
        g, members, output_split_sizes=in_sizes, input_split_sizes=out_sizes, axis=axis, dim=dim
    ),
)


@with_vjp
def all_to_all(
    x: AnyArray,
    group: GroupLike = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    axis: int | None = None,
    dim: int | None = None,
) -> Any:
    """Send a block of `x` to each rank, and return the blocks that the ranks send to this one.

    The gradients of the blocks are sent back (Varying to Varying), by an all_to_all.

    Args:
        x: An array that is split along `axis`, along which the received blocks are concatenated; or a list with an
            array for each rank, for which a list is returned. In that list, the array from rank i has the shape of
            `x[i]`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        output_split_sizes: The rows of the block from each rank. None: equal blocks.
        input_split_sizes: The rows of the block for each rank. None: equal blocks.
        axis: The dimension. None: dimension 0.
        dim: The same, by torch's name.

    Raises:
        TypeError: `x` is not an array.
        ValueError: That dimension is missing, both `axis` and `dim` are given, or the blocks do not fit; or the length
            of a list is not the group's size.

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
    x = x if x is Wanted else array_of("all_to_all", members, x)
    return _ALL_TO_ALL(x, members, output_split_sizes, input_split_sizes, axis, dim)


# ---- broadcast, and the two ways back


def _only_on(x: Any, members: ProcessGroup, root: int) -> Any:
    return as_any_array(x).copy() if members.rank() == root else np.zeros_like(x)


def _reduced_to(x: Any, members: ProcessGroup, root: int) -> Any:
    total = functional.reduce(x, group=members, group_dst=root)
    return np.zeros_like(x) if total is None else total


def _pull_broadcast(g: Any, x: Any, y: Any, members: ProcessGroup, root: int, grad: str) -> Any:
    if grad == "reduce":
        return _REDUCED_TO(g, members, root)
    check_invariant("broadcast", members, g)
    return _ONLY_ON(g, members, root)


_BROADCAST = Collective(
    "broadcast",
    lambda x, members, root, grad: functional.broadcast(x, group=members, group_src=root),
    _pull_broadcast,
)
_REDUCED_TO = Collective("reduce", _reduced_to, lambda g, x, y, members, root: _BROADCAST(g, members, root, "reduce"))
_ONLY_ON = Collective("broadcast", _only_on, lambda g, x, y, members, root: _BROADCAST(g, members, root, "identity"))


@with_vjp
def broadcast(
    x: AnyArray, src: int | None = None, group: GroupLike = None, group_src: int | None = None, *, grad: str = "reduce"
) -> AnyArray:
    """Return the array of the rank `src`; elsewhere `x` gives its shape and dtype, and has a gradient of zeros.

    Args:
        x: An array or a number.
        src: Global rank of the sender.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        group_src: The sender's rank in the group, instead of `src`.
        grad: The gradient of `x` on `src`. "reduce": the sum of the gradients of all ranks (to Replicate); a reduce.
            "identity": its own gradient of the result, which is the same on all ranks (to Invariant); sends nothing.

    Raises:
        TypeError: `x` is not an array or a number.
        ValueError: No sender is given, or both `src` and `group_src`; the sender is not a member; or `grad` is unknown.

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
    x = x if x is Wanted else array_of("broadcast", members, x)
    return _BROADCAST(x, members, root, checked_grad(members.error_prefix("broadcast"), grad))
