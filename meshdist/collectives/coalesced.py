"""The coalesced collectives: one call for a list of arrays. `coalescing_manager` makes such calls out of several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from meshdist.arrays.host import AnyArray, Array, OutputOrWork, split_rows
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.collectives.algorithms.blocks import joined
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.checks import (
    agree_on_list,
    check_one_dtype,
    check_reducible,
    check_same_shape,
    check_stacked_pair,
    refuse,
    several,
)
from meshdist.collectives.composed import composed, pack_all, unchained, unpack_all
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from meshdist.runtime.call import Buffers, Call, each
from meshdist.runtime.context import GroupLike, resolve


def _check_pairs(call: Call, whole_side: str, block_side: str) -> None:
    wholes, blocks = several(call, whole_side), several(call, block_side)
    names = dict(zip(("send", "recv"), call.collective.names, strict=True))
    if len(wholes) != len(blocks):
        sizes = f"{len(wholes)} and {len(blocks)}"
        refuse(call, f"{names[whole_side]} and {names[block_side]} must hold the same number of arrays, got {sizes}")
    for place, (whole, block) in enumerate(zip(wholes, blocks, strict=True)):
        check_stacked_pair(call, whole, block, (f"{names[whole_side]}[{place}]", f"{names[block_side]}[{place}]"))
    check_one_dtype(call)


def _check_gather(call: Call) -> None:
    _check_pairs(call, "recv", "send")


def _take_gathered(call: Call, flat: Array, recv: Buffers) -> None:
    # A row is what one rank sent: its block of each array, one behind the other.
    rows, begin = flat.reshape(call.size, -1), 0
    for array in each(recv):
        count = array.size // call.size
        array.reshape(call.size, count)[...] = rows[:, begin : begin + count]
        begin += count


@composed(
    all_gather_into_tensor,
    names=("input_tensors", "output_tensors"),
    check=_check_gather,
    agreed=partial(agree_on_list, side="send"),
    put=pack_all,
    room=lambda call, flat: np.empty(call.size * flat.size, flat.dtype),
    take=_take_gathered,
    by_element=True,
)
def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[AnyArray],
    input_tensors: Sequence[AnyArray],
    group: GroupLike = None,
    async_op: bool = False,
) -> OutputOrWork:
    """Do `all_gather_into_tensor` for each pair of arrays of two lists, by one call.

    Args:
        output_tensors: Outputs, each of a shape that `all_gather_into_tensor` takes.
        input_tensors: Inputs, one for each output, all of one dtype; all ranks must pass the same number of arrays,
            with the same numbers of elements.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output_tensors`; with `async_op` the Work.
    """
    return resolve(group).submit(all_gather_into_tensor_coalesced, input_tensors, output_tensors, None, None, async_op)


def _check_scatter(call: Call) -> None:
    _check_pairs(call, "send", "recv")
    check_reducible(call)


def _put_by_rank(call: Call, send: Buffers) -> Array:
    rows = [split_rows(array, call.size) for array in each(send)]
    return joined([row[rank] for rank in range(call.size) for row in rows])


@composed(
    reduce_scatter_tensor,
    names=("input_tensors", "output_tensors"),
    check=_check_scatter,
    agreed=partial(agree_on_list, side="recv"),
    put=_put_by_rank,
    room=lambda call, flat: np.empty(flat.size // call.size, flat.dtype),
    take=unpack_all,
    by_element=True,
)
def reduce_scatter_tensor_coalesced(
    output_tensors: Sequence[AnyArray],
    input_tensors: Sequence[AnyArray],
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> OutputOrWork:
    """Do `reduce_scatter_tensor` for each pair of arrays of two lists, by one call.

    Args:
        output_tensors: Outputs, all of one dtype; all ranks must pass the same number of arrays, with the same numbers
            of elements.
        input_tensors: Inputs, one for each output, each of a shape that `reduce_scatter_tensor` takes.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output_tensors`; with `async_op` the Work.
    """
    return resolve(group).submit(reduce_scatter_tensor_coalesced, input_tensors, output_tensors, op, None, async_op)


def _check_all_reduce(call: Call) -> None:
    several(call, "recv")
    check_one_dtype(call)
    check_reducible(call)


@composed(
    all_reduce,
    names=("tensors", "tensors"),
    check=_check_all_reduce,
    agreed=partial(agree_on_list, side="recv", is_elementwise=True),
    put=pack_all,
    take=unpack_all,
    by_element=True,
)
def all_reduce_coalesced(
    tensors: Sequence[AnyArray], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> OutputOrWork:
    """Reduce each of several arrays over the group, in place, in one call.

    Args:
        tensors: At least one array, all of one dtype; all ranks must pass the same number of arrays, with the same
            numbers of elements.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `tensors`; with `async_op` the Work.

    Raises:
        TypeError: `tensors` is not a list of arrays, their dtypes differ, or the dtype is unsupported or undefined for
            `op`.
        ValueError: The list is empty, an array cannot be written, or `op` is unknown.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return resolve(group).submit(all_reduce_coalesced, tensors, tensors, op, None, async_op)


def _check_all_gather(call: Call) -> None:
    give, take = several(call, "send"), several(call, "recv")
    check_one_dtype(call)
    for place, array in enumerate(take):
        peer, number = divmod(place, len(give))
        names = f"output_tensor_lists[{peer}][{number}]", f"input_tensor_list[{number}]"
        check_same_shape(call, array, give[number], names)


@composed(
    all_gather_into_tensor,
    names=("input_tensor_list", "output_tensor_lists"),
    check=_check_all_gather,
    agreed=partial(agree_on_list, side="send"),
    put=pack_all,
    room=lambda call, flat: np.empty(call.size * flat.size, flat.dtype),
    take=unpack_all,
)
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[AnyArray]],
    input_tensor_list: Sequence[AnyArray],
    group: GroupLike = None,
    async_op: bool = False,
) -> OutputOrWork:
    """Gather each of several arrays of every rank, in one call.

    Args:
        output_tensor_lists: Output: a list for each rank; `output_tensor_lists[i][k]` gets `input_tensor_list[k]` of
            rank i.
        input_tensor_list: Input: at least one array, all of one dtype; all ranks must pass the same number of arrays,
            with the same numbers of elements.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output_tensor_lists`; with `async_op` the Work; its result is one list of all arrays.

    Raises:
        TypeError: An argument is not a list of arrays, or the dtypes differ or are unsupported.
        ValueError: A list has the wrong length, a shape is wrong, or an output cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    lists = unchained(members, all_gather_coalesced, output_tensor_lists, input_tensor_list, side="recv", by_rank=True)
    work = members.submit(all_gather_coalesced, input_tensor_list, lists, None, None, async_op)
    return work if async_op or work is None else output_tensor_lists
