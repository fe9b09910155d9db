"""reduce_scatter_tensor: every rank gets the reduction of its rows of all ranks' arrays."""

from __future__ import annotations

from typing import Any

from meshdist.call import Call
from meshdist.collectives.algorithms.ring import ring_reduce_scatter
from meshdist.collectives.checks import agree_on_block, check_one_dtype, check_reducible, check_stacked
from meshdist.collectives.definition import collective
from meshdist.current import GroupLike, resolve
from meshdist.reduce_op import Op, ReduceOp


def check(call: Call) -> None:
    """Check the arguments of reduce_scatter_tensor."""
    check_stacked(call, "send", "recv")
    check_one_dtype(call)
    check_reducible(call)


def agreed(call: Call) -> tuple[Any, ...]:
    """All ranks receive as many elements."""
    return agree_on_block(call, "recv")


@collective(names=("input", "output"), check=check, agreed=agreed, default=ring_reduce_scatter)
def reduce_scatter_tensor(
    output: Any, input: Any, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Any:
    """Reduce `input` over the group and give each rank its equal part of the result, in rank order.

    Args:
        output: Output of shape `(rows, ...)`.
        input: Input, either concatenated, `(world_size * rows, ...)`, or stacked, `(world_size, rows, ...)`. It stays
            as it is.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world where None.
        async_op: Return a `Work` at once.

    Returns:
        `output`; with `async_op` the Work.

    Raises:
        TypeError: Not arrays, dtypes that differ, do not travel or that `op` is not defined for.
        ValueError: A wrong shape, or an output that cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not come within the group's timeout.
    """
    return resolve(group).submit(reduce_scatter_tensor, input, output, op, None, async_op)


# The newer name of the same.
reduce_scatter_single = reduce_scatter_tensor
