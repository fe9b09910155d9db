"""reduce_scatter_tensor: every rank gets the reduction of its rows of all ranks' arrays."""

from __future__ import annotations

from functools import partial

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.collectives.algorithms.ring import ring_reduce_scatter
from meshdist.collectives.checks import agree_on_block, check_one_dtype, check_reducible, check_stacked
from meshdist.collectives.dataflow import REDUCE_SCATTER
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    check_stacked(call, "send", "recv")
    check_one_dtype(call)
    check_reducible(call)


@collective(
    names=("input", "output"),
    check=check,
    agreed=partial(agree_on_block, side="recv"),
    default=ring_reduce_scatter,
    dataflow=REDUCE_SCATTER,
)
def reduce_scatter_tensor(
    output: AnyArray, input: AnyArray, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> OutputOrWork:
    """Reduce `input` over the group and give each rank its equal part of the result, in rank order.

    Args:
        output: Output of shape `(rows, ...)`.
        input: Input, either concatenated, `(world_size * rows, ...)`, or stacked, `(world_size, rows, ...)`. It is not
            changed.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output`; with `async_op` the Work.

    Raises:
        TypeError: An argument is not an array, the dtypes differ, or the dtype is unsupported or undefined for `op`.
        ValueError: A wrong shape, or an output that cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return resolve(group).submit(reduce_scatter_tensor, input, output, op, None, async_op)


# The newer name.
reduce_scatter_single = reduce_scatter_tensor
