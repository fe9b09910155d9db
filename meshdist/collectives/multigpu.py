"""Collectives of processes that hold one array for each of several devices.

A process first reduces its own arrays, or passes on one of them, and so acts as one rank. All ranks pass lists of the
same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isqrt
from operator import index
from typing import Any

import numpy as np

from meshdist.arrays.host import AnyArray, Array, OutputOrWork
from meshdist.arrays.reduce_op import Op, ReduceOp, quietly
from meshdist.collectives.algorithms.blocks import joined
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.broadcast import broadcast
from meshdist.collectives.checks import check_blocks_alike, check_one_dtype, check_reducible, several
from meshdist.collectives.composed import composed, pack_all, unchained, unpack_all
from meshdist.collectives.reduce import reduce
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from meshdist.runtime.call import Buffers, Call, each
from meshdist.runtime.context import GroupLike, resolve


def _check_alike(call: Call, side: str) -> None:
    arrays = several(call, side)
    name = call.collective.names[0 if side == "send" else 1]
    check_blocks_alike(call, arrays, name, arrays[0], f"{name}[0]")
    check_one_dtype(call)


def _agree(call: Call, side: str) -> tuple[Any, ...]:
    arrays = several(call, side)
    return (f"{len(arrays)} x {arrays[0].dtype}[{arrays[0].size}]",)


def _check_send(call: Call) -> None:
    _check_alike(call, "send")
    check_reducible(call)


def _combined(call: Call, arrays: list[Array]) -> Array:
    assert call.op is not None
    total: Array = arrays[0].reshape(-1).copy()
    for array in arrays[1:]:
        quietly(call.op.ufunc, total, array.reshape(-1), out=total)
    quietly(call.op.finish, total, len(arrays))
    return total


def _put_combined(call: Call, send: Buffers) -> Array:
    return _combined(call, each(send))


def _take_everywhere(call: Call, flat: Array, recv: Buffers) -> None:
    for array in each(recv):
        array[...] = flat.reshape(array.shape)


def _put_of_root(call: Call, send: Buffers) -> Array:
    # On other ranks the array is overwritten.
    first: Array = each(send)[0].reshape(-1)
    return first


def _the_one(name: str, tensor_list: Sequence[Any], place: int) -> Any:
    if not isinstance(tensor_list, (list, tuple)):
        raise TypeError(f"tensor_list must be a list of arrays, got {type(tensor_list).__name__}")
    try:
        number = index(place)
    except TypeError:
        raise TypeError(f"{name} must be an integer, a place in tensor_list, got {place!r}") from None
    if not 0 <= number < len(tensor_list):
        raise ValueError(f"{name} must be 0 to {len(tensor_list) - 1}, a place in tensor_list, got {place}")
    return tensor_list[number]


@composed(
    broadcast,
    names=("tensor_list[src_tensor]", "tensor_list"),
    check=partial(_check_alike, side="recv"),
    agreed=partial(_agree, side="recv"),
    put=_put_of_root,
    take=_take_everywhere,
    lists=("recv",),
    by_device=True,
)
def broadcast_multigpu(
    tensor_list: Sequence[AnyArray],
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    src_tensor: int = 0,
    group_src: int | None = None,
) -> OutputOrWork:
    """Copy one array of one rank to all arrays of all ranks.

    Args:
        tensor_list: Arrays of one shape and dtype; the same number on all ranks.
        src: Global rank of the source; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.
        src_tensor: The place of the source in the list of that rank.
        group_src: The source's rank in the group, instead of `src`.

    Returns:
        `tensor_list`; with `async_op` the Work.
    """
    members = resolve(group)
    root = members.root("broadcast_multigpu", "src", src, group_src)
    given = members.named(members.error_prefix("broadcast_multigpu"), _the_one, "src_tensor", tensor_list, src_tensor)
    return members.submit(broadcast_multigpu, given, tensor_list, None, root, async_op)


@composed(
    all_reduce,
    names=("tensor_list", "tensor_list"),
    check=_check_send,
    agreed=partial(_agree, side="send"),
    put=_put_combined,
    take=_take_everywhere,
    by_device=True,
)
def all_reduce_multigpu(
    tensor_list: Sequence[AnyArray], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> OutputOrWork:
    """Reduce all arrays of all ranks, in place; every array gets the result.

    Args:
        tensor_list: Arrays of one shape and dtype; the same number on all ranks.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `tensor_list`; with `async_op` the Work.
    """
    return resolve(group).submit(all_reduce_multigpu, tensor_list, tensor_list, op, None, async_op)


@composed(
    reduce,
    names=("tensor_list", "tensor_list[dst_tensor]"),
    check=_check_send,
    agreed=partial(_agree, side="send"),
    put=_put_combined,
    take=_take_everywhere,
    writes=lambda call: call.rank == call.root,
    lists=("send",),
    by_device=True,
)
def reduce_multigpu(
    tensor_list: Sequence[AnyArray],
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    dst_tensor: int = 0,
    group_dst: int | None = None,
) -> OutputOrWork:
    """Reduce all arrays of all ranks into one array of one rank; the others are unchanged.

    Args:
        tensor_list: Arrays of one shape and dtype; the same number on all ranks.
        dst: Global rank of the destination; as a method, its rank in the group or along the mesh.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.
        dst_tensor: The place in the list of that rank of the array that gets the result.
        group_dst: The destination's rank in the group, instead of `dst`.

    Returns:
        `tensor_list[dst_tensor]`; with `async_op` the Work.
    """
    members = resolve(group)
    root = members.root("reduce_multigpu", "dst", dst, group_dst)
    taken = members.named(members.error_prefix("reduce_multigpu"), _the_one, "dst_tensor", tensor_list, dst_tensor)
    return members.submit(reduce_multigpu, tensor_list, taken, op, root, async_op)


def _check_gather(call: Call) -> None:
    _check_alike(call, "send")
    check_blocks_alike(
        call, several(call, "recv"), "output_tensor_lists, flattened, ", several(call, "send")[0], "the inputs"
    )


def _take_lists(call: Call, flat: Array, recv: Buffers) -> None:
    # Each list of this process gets the whole result.
    arrays = each(recv)
    num_lists = isqrt(len(arrays) // call.size)
    for place in range(num_lists):
        unpack_all(call, flat, arrays[place * call.size * num_lists : (place + 1) * call.size * num_lists])


@composed(
    all_gather_into_tensor,
    names=("input_tensor_list", "output_tensor_lists"),
    check=_check_gather,
    agreed=partial(_agree, side="send"),
    put=pack_all,
    room=lambda call, flat: np.empty(call.size * flat.size, flat.dtype),
    take=_take_lists,
    by_device=True,
)
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[AnyArray]],
    input_tensor_list: Sequence[AnyArray],
    group: GroupLike = None,
    async_op: bool = False,
) -> OutputOrWork:
    """Gather all arrays of all ranks into each of several lists.

    Args:
        output_tensor_lists: Output: as many lists as inputs; array j of rank k goes to place `k * num_inputs + j` of
            every list, which holds `world_size * num_inputs` arrays.
        input_tensor_list: Input: arrays of one shape and dtype; the same number on all ranks.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output_tensor_lists`; with `async_op` the Work.
    """
    members = resolve(group)
    lists = unchained(members, all_gather_multigpu, output_tensor_lists, input_tensor_list, side="recv")
    work = members.submit(all_gather_multigpu, input_tensor_list, lists, None, None, async_op)
    return work if async_op or work is None else output_tensor_lists


def _check_scatter(call: Call) -> None:
    _check_alike(call, "recv")
    check_blocks_alike(
        call, several(call, "send"), "input_tensor_lists, flattened, ", several(call, "recv")[0], "the outputs"
    )
    check_reducible(call)


def _put_lists(call: Call, send: Buffers) -> Array:
    arrays = each(send)
    length = isqrt(len(arrays) // call.size) * call.size
    return _combined(call, [joined(arrays[begin : begin + length]) for begin in range(0, len(arrays), length)])


@composed(
    reduce_scatter_tensor,
    names=("input_tensor_lists", "output_tensor_list"),
    check=_check_scatter,
    agreed=partial(_agree, side="recv"),
    put=_put_lists,
    room=lambda call, flat: np.empty(flat.size // call.size, flat.dtype),
    take=unpack_all,
    by_device=True,
)
def reduce_scatter_multigpu(
    output_tensor_list: Sequence[AnyArray],
    input_tensor_lists: Sequence[Sequence[AnyArray]],
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> OutputOrWork:
    """Reduce the lists of all ranks place by place, and give each array of each rank the result at its place.

    Args:
        output_tensor_list: Output: arrays of one shape and dtype; the same number on all ranks. Array j of rank k gets
            the reduction of all arrays at place `k * num_outputs + j`.
        input_tensor_lists: Input: as many lists as outputs, each of `world_size * num_outputs` arrays.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output_tensor_list`; with `async_op` the Work.
    """
    members = resolve(group)
    lists = unchained(members, reduce_scatter_multigpu, input_tensor_lists, output_tensor_list, side="send")
    return members.submit(reduce_scatter_multigpu, lists, output_tensor_list, op, None, async_op)
