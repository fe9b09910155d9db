"""reduce_scatter: every rank gets the reduction of its block of all ranks' lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.collectives.algorithms.ring import ring_reduce_scatter
from meshdist.collectives.checks import agree_on_blocks, check_one_dtype, check_reducible, check_same_shape, many, one
from meshdist.collectives.dataflow import REDUCE_SCATTER
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    blocks, block = many(call, "send"), one(call, "recv")
    check_one_dtype(call)
    check_same_shape(call, block, blocks[call.rank], ("output", f"input_list[{call.rank}]"))
    check_reducible(call)


@collective(
    names=("input_list", "output"),
    check=check,
    agreed=partial(agree_on_blocks, side="send"),
    default=ring_reduce_scatter,
    dataflow=REDUCE_SCATTER,
    lists=("send",),
)
def reduce_scatter(
    output: AnyArray,
    input_list: Sequence[AnyArray],
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> OutputOrWork:
    """Reduce lists of arrays over the group, and scatter the results: each rank gets the one at its index.

    Args:
        output: Output, of the shape of `input_list[rank]`.
        input_list: One array for each rank; `input_list[i]` has the same number of elements on all ranks. It is not
            changed.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output`; with `async_op` the Work.

    Raises:
        TypeError: An argument is not an array, the dtypes differ, or the dtype is unsupported or undefined for `op`.
        ValueError: The list has the wrong length, a shape is wrong, or an output cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return resolve(group).submit(reduce_scatter, input_list, output, op, None, async_op)
