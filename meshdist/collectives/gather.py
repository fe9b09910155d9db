"""gather: one rank gets the arrays of all ranks, as a list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.collectives.algorithms.rooted import star_gather
from meshdist.collectives.checks import agree_on_one, check_blocks_alike, check_no_list, check_one_dtype, many, one
from meshdist.collectives.dataflow import GATHER
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    tensor = one(call, "send")
    if call.rank != call.root:
        check_no_list(call, "recv", "dst")
        return
    check_blocks_alike(call, many(call, "recv"), "gather_list", tensor, "tensor")
    check_one_dtype(call)


@collective(
    names=("tensor", "gather_list"),
    check=check,
    agreed=partial(agree_on_one, side="send"),
    default=star_gather,
    dataflow=GATHER,
    writes=lambda call: call.rank == call.root,
    lists=("recv",),
)
def gather(
    tensor: AnyArray,
    gather_list: Sequence[AnyArray] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> OutputOrWork:
    """Gather every rank's `tensor` into a list on one rank.

    Args:
        tensor: Input; all ranks must pass the same number of elements and the same dtype.
        gather_list: Output. On the destination: one array for each rank, of the shape of `tensor`. Elsewhere None.
        dst: Global rank of the destination; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.
        group_dst: The destination's rank in the group, instead of `dst`. Without either it is the group's first rank.

    Returns:
        `gather_list`; with `async_op` the Work.

    Raises:
        TypeError: An argument is not an array, or the dtypes differ or are unsupported.
        ValueError: Both `dst` and `group_dst` are given, or the destination is not a member; `gather_list` is given on
            a rank that is not the destination, has the wrong length, or holds arrays that have the wrong shape or
            cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    root = members.root_or_first("gather", "dst", dst, group_dst)
    return members.submit(gather, tensor, gather_list, None, root, async_op)
