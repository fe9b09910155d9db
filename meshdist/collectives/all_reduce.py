"""all_reduce: every rank gets the reduction of all ranks' arrays."""

from __future__ import annotations

from typing import Any

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.collectives.algorithms.ring import ring_all_reduce
from meshdist.collectives.checks import agree_on_array, check_one, check_reducible
from meshdist.collectives.dataflow import ALL_REDUCE
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    check_one(call)
    check_reducible(call)


@collective(check=check, agreed=agree_on_array, default=ring_all_reduce, dataflow=ALL_REDUCE)
def all_reduce(
    tensor: AnyArray, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> OutputOrWork:
    """Reduce `tensor` over the group, in place; every rank gets the result.

    The result is the same on all ranks to the last bit, and the same from run to run.

    Args:
        tensor: An array; all ranks must pass the same shape and dtype.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `tensor`; with `async_op` the Work.

    Raises:
        TypeError: The argument is not an array, or its dtype is unsupported or undefined for `op`.
        ValueError: `tensor` cannot be written, or `op` is unknown.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return resolve(group).submit(all_reduce, tensor, tensor, op, None, async_op)


def all_reduced(x: Any, op: Op, group: GroupLike) -> Any:
    """Return the reduction of the array `x`, which is not changed, in a new array; see `all_reduce`."""
    members = resolve(group)
    if members.reduces_apart(x):  # which saves a copy
        return members.submit(all_reduce, x, new_empty(x.shape, x), op, None, False)
    y = x.copy()
    all_reduce(y, op, group)  # returns nothing on a rank that is not in the group
    return y
