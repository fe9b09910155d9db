"""all_gather: every rank gets the arrays of all ranks, as a list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.collectives.algorithms.ring import ring_all_gather
from meshdist.collectives.checks import agree_on_blocks, check_one_dtype, check_same_shape, many, one
from meshdist.collectives.dataflow import ALL_GATHER
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    blocks, block = many(call, "recv"), one(call, "send")
    check_one_dtype(call)
    check_same_shape(call, block, blocks[call.rank], ("tensor", f"tensor_list[{call.rank}]"))


@collective(
    names=("tensor", "tensor_list"),
    check=check,
    agreed=partial(agree_on_blocks, side="recv"),
    default=ring_all_gather,
    dataflow=ALL_GATHER,
    lists=("recv",),
)
def all_gather(
    tensor_list: Sequence[AnyArray], tensor: AnyArray, group: GroupLike = None, async_op: bool = False
) -> OutputOrWork:
    """Gather every rank's `tensor` into a list on all ranks.

    Args:
        tensor_list: Output: one array for each rank, `tensor_list[i]` of the shape that rank i sends. The shapes may
            differ from rank to rank, but all ranks must expect the same ones.
        tensor: Input, of the shape of `tensor_list[rank]`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `tensor_list`; with `async_op` the Work.

    Raises:
        TypeError: An argument is not an array, or the dtypes differ or are unsupported.
        ValueError: The list has the wrong length, a shape is wrong, or an output cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return resolve(group).submit(all_gather, tensor, tensor_list, None, None, async_op)
