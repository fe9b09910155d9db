"""all_gather_into_tensor: every rank gets the arrays of all ranks, as one array."""

from __future__ import annotations

from functools import partial
from typing import Any

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.collectives.algorithms.ring import ring_all_gather
from meshdist.collectives.checks import agree_on_block, check_one_dtype, check_stacked
from meshdist.collectives.dataflow import ALL_GATHER
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    check_stacked(call, "recv", "send")
    check_one_dtype(call)


@collective(
    names=("input_tensor", "output_tensor"),
    check=check,
    agreed=partial(agree_on_block, side="send"),
    default=ring_all_gather,
    dataflow=ALL_GATHER,
)
def all_gather_into_tensor(
    output_tensor: AnyArray, input_tensor: AnyArray, group: GroupLike = None, async_op: bool = False
) -> OutputOrWork:
    """Gather every rank's `input_tensor` into one array on all ranks, in rank order.

    Args:
        output_tensor: Output: for inputs of shape `(rows, ...)`, either concatenated, `(world_size * rows, ...)`, or
            stacked, `(world_size, rows, ...)`.
        input_tensor: Input; all ranks must pass the same number of elements and the same dtype.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output_tensor`; with `async_op` the Work.

    Raises:
        TypeError: An argument is not an array, or the dtypes differ or are unsupported.
        ValueError: A wrong shape, or an output that cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return resolve(group).submit(all_gather_into_tensor, input_tensor, output_tensor, None, None, async_op)


def _agreed_along(call: Call) -> tuple[Any, ...]:
    # Not the call of a list, whose ranks must all pass lists.
    return (*all_gather_into_tensor.agreed(call), "concatenated")


# What `functional.all_gather` calls along a dimension.
all_gather_along = all_gather_into_tensor.under("all_gather", _agreed_along)
# The newer name.
all_gather_single = all_gather_into_tensor
