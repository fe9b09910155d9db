"""broadcast: every rank gets the array of one."""

from __future__ import annotations

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.collectives.algorithms.rooted import binomial_broadcast
from meshdist.collectives.checks import agree_on_array, check_one
from meshdist.collectives.dataflow import BROADCAST
from meshdist.collectives.definition import collective
from meshdist.runtime.context import GroupLike, resolve


@collective(
    check=check_one,
    agreed=agree_on_array,
    default=binomial_broadcast,
    dataflow=BROADCAST,
    writes=lambda call: call.rank != call.root,
)
def broadcast(
    tensor: AnyArray,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> OutputOrWork:
    """Copy `tensor` from one rank to all others, in place.

    Args:
        tensor: An array; all ranks must pass the same shape and dtype. On the source it is only read.
        src: Global rank of the source; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.
        group_src: The source's rank in the group, instead of `src`.

    Returns:
        `tensor`; with `async_op` the Work.

    Raises:
        TypeError: The argument is not an array, or its dtype is unsupported.
        ValueError: Both or neither of `src` and `group_src` are given, the rank is not a member of the group, or
            `tensor` cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    return members.submit(broadcast, tensor, tensor, None, members.root("broadcast", "src", src, group_src), async_op)
