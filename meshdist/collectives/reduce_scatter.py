"""reduce_scatter: every rank gets the reduction of its block of all ranks' lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.call import Call
from meshdist.collectives.algorithms.ring import ring_reduce_scatter
from meshdist.collectives.checks import (
    agree_on_blocks,
    check_one_dtype,
    check_reducible,
    check_same_shape,
    many,
    one,
)
from meshdist.collectives.definition import collective
from meshdist.current import GroupLike, resolve
from meshdist.reduce_op import Op, ReduceOp


def check(call: Call) -> None:
    """Check the arguments of reduce_scatter."""
    blocks, block = many(call, "send"), one(call, "recv")
    check_one_dtype(call)
    check_same_shape(call, block, blocks[call.rank], ("output", f"input_list[{call.rank}]"))
    check_reducible(call)


def agreed(call: Call) -> tuple[Any, ...]:
    """All ranks pass the same number of elements for each."""
    return agree_on_blocks(call, "send")


@collective(names=("input_list", "output"), check=check, agreed=agreed, default=ring_reduce_scatter, lists=("send",))
def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Any:
    """Reduce a list of arrays over the group and give each rank the one at its place.

    Args:
        output: Output, of the shape of `input_list[rank]`.
        input_list: One array for each rank; `input_list[i]` is of as many elements on all ranks. It stays as it is.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world where None.
        async_op: Return a `Work` at once.

    Returns:
        `output`; with `async_op` the Work.

    Raises:
        TypeError: Not arrays, dtypes that differ, do not travel or that `op` is not defined for.
        ValueError: A list of wrong length, a wrong shape, or an output that cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not come within the group's timeout.
    """
    return resolve(group).submit(reduce_scatter, input_list, output, op, None, async_op)
