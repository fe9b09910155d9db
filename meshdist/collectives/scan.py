"""scan and exscan: every rank gets the reduction of the arrays of the ranks up to it, or before it."""

from __future__ import annotations

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.collectives.algorithms.ring import chain_exscan, chain_scan
from meshdist.collectives.checks import agree_on_array, check_one, check_reducible, refuse
from meshdist.collectives.dataflow import EXSCAN, SCAN
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    check_one(call)
    check_reducible(call)
    if call.op is ReduceOp.AVG:
        refuse(call, "op must not be AVG; use SUM, and divide by the number of ranks in the sum")


@collective(check=check, agreed=agree_on_array, default=chain_scan, dataflow=SCAN)
def scan(tensor: AnyArray, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False) -> OutputOrWork:
    """Reduce `tensor` over the ranks up to this one, in place: MPI's Scan.

    Rank r gets the reduction of the arrays of ranks 0 to r, in rank order.

    Args:
        tensor: An array; all ranks must pass the same shape and dtype.
        op: The reduction: a ReduceOp other than AVG, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `tensor`; with `async_op` the Work.

    Raises:
        TypeError: The argument is not an array, or its dtype is unsupported or undefined for `op`.
        ValueError: `tensor` cannot be written, or `op` is unknown or AVG.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> dist.run(lambda: int(dist.scan(np.array(dist.get_rank() + 1))), 4)
        [1, 3, 6, 10]
    """
    return resolve(group).submit(scan, tensor, tensor, op, None, async_op)


@collective(check=check, agreed=agree_on_array, default=chain_exscan, dataflow=EXSCAN)
def exscan(tensor: AnyArray, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False) -> OutputOrWork:
    """Reduce `tensor` over the ranks before this one, in place: MPI's Exscan.

    Rank r gets the reduction of the arrays of ranks 0 to r - 1, in rank order: if the arrays are the lengths of parts,
    this is where the part of rank r begins. Rank 0 gets the identity of `op`: 0 for SUM, 1 for PRODUCT, the largest
    value of the dtype for MIN (infinity, where it has one), the smallest for MAX, all bits set for BAND, none for BOR
    and BXOR.

    Args:
        tensor: An array; all ranks must pass the same shape and dtype.
        op: The reduction: a ReduceOp other than AVG, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `tensor`; with `async_op` the Work.

    Raises:
        TypeError: The argument is not an array, or its dtype is unsupported or undefined for `op`.
        ValueError: `tensor` cannot be written, or `op` is unknown or AVG.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> dist.run(lambda: int(dist.exscan(np.array(dist.get_rank() + 1))), 4)
        [0, 1, 3, 6]
    """
    return resolve(group).submit(exscan, tensor, tensor, op, None, async_op)
