"""all_reduce_coalesced: one all_reduce for a list of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.checks import agree_on_list, check_one_dtype, check_reducible, several
from meshdist.collectives.composed import composed, pack_all, unpack_all
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    several(call, "recv")
    check_one_dtype(call)
    check_reducible(call)


@composed(
    all_reduce,
    names=("tensors", "tensors"),
    check=check,
    agreed=partial(agree_on_list, side="recv", is_elementwise=True),
    put=pack_all,
    take=unpack_all,
    by_element=True,
)
def all_reduce_coalesced(
    tensors: Sequence[Any], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Any:
    """Reduce each of several arrays over the group, in place, by one call for all of them.

    Args:
        tensors: At least one array, all of one dtype; all ranks must pass the same number of arrays, with the same
            numbers of elements.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `tensors`; with `async_op` the Work.

    Raises:
        TypeError: Not a list of arrays, different dtypes, or ones unsupported or undefined for `op`.
        ValueError: An empty list, arrays that cannot be written, or an unknown `op`.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return resolve(group).submit(all_reduce_coalesced, tensors, tensors, op, None, async_op)
