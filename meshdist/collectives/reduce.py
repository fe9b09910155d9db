"""reduce: one rank gets the reduction of all ranks' arrays."""

from __future__ import annotations

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.collectives.algorithms.rooted import binomial_reduce
from meshdist.collectives.checks import agree_on_array, check_one, check_reducible
from meshdist.collectives.dataflow import REDUCE
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    check_one(call)
    check_reducible(call)


@collective(
    check=check,
    agreed=agree_on_array,
    default=binomial_reduce,
    dataflow=REDUCE,
    writes=lambda call: call.rank == call.root,
)
def reduce(
    tensor: AnyArray,
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> OutputOrWork:
    """Reduce `tensor` over the group into the array of one rank; the arrays of the other ranks are unchanged.

    Args:
        tensor: An array; all ranks must pass the same shape and dtype. Written on the destination only.
        dst: Global rank of the destination; as a method, its rank in the group or along the mesh.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.
        group_dst: The destination's rank in the group, instead of `dst`.

    Returns:
        `tensor`; with `async_op` the Work.

    Raises:
        TypeError: The argument is not an array, or its dtype is unsupported or undefined for `op`.
        ValueError: Both or neither of `dst` and `group_dst` are given, the rank is not a member of the group, or
            `tensor` cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    return members.submit(reduce, tensor, tensor, op, members.root("reduce", "dst", dst, group_dst), async_op)
