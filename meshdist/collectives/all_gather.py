"""all_gather: every rank gets the arrays of all ranks, as a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.call import Call
from meshdist.collectives.algorithms.ring import ring_all_gather
from meshdist.collectives.checks import agree_on_blocks, check_one_dtype, check_same_shape, many, one
from meshdist.collectives.definition import collective
from meshdist.current import GroupLike, resolve


def check(call: Call) -> None:
    """Check the arguments of all_gather."""
    blocks, block = many(call, "recv"), one(call, "send")
    check_one_dtype(call)
    check_same_shape(call, block, blocks[call.rank], ("tensor", f"tensor_list[{call.rank}]"))


def agreed(call: Call) -> tuple[Any, ...]:
    """All ranks expect the same number of elements from each."""
    return agree_on_blocks(call, "recv")


@collective(names=("tensor", "tensor_list"), check=check, agreed=agreed, default=ring_all_gather, lists=("recv",))
def all_gather(tensor_list: Sequence[Any], tensor: Any, group: GroupLike = None, async_op: bool = False) -> Any:
    """Gather every rank's `tensor` into a list on all ranks.

    Args:
        tensor_list: Output: one array for each rank, `tensor_list[i]` of the shape that rank i sends. The shapes may
            differ from rank to rank, but all ranks must expect the same ones.
        tensor: Input, of the shape of `tensor_list[rank]`.
        group: A ProcessGroup or a DeviceMesh; the world where None.
        async_op: Return a `Work` at once.

    Returns:
        `tensor_list`; with `async_op` the Work.

    Raises:
        TypeError: Not arrays, dtypes that differ or do not travel.
        ValueError: A list of wrong length, a wrong shape, or an output that cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not come within the group's timeout.
    """
    return resolve(group).submit(all_gather, tensor, tensor_list, None, None, async_op)
