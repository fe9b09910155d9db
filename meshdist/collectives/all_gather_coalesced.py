"""all_gather_coalesced: one all_gather for a list of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.checks import agree_on_list, check_one_dtype, check_same_shape, several
from meshdist.collectives.composed import composed, pack_all, unchained, unpack_all
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    give, take = several(call, "send"), several(call, "recv")
    check_one_dtype(call)
    for place, array in enumerate(take):
        peer, number = divmod(place, len(give))
        names = f"output_tensor_lists[{peer}][{number}]", f"input_tensor_list[{number}]"
        check_same_shape(call, array, give[number], names)


@composed(
    all_gather_into_tensor,
    names=("input_tensor_list", "output_tensor_lists"),
    check=check,
    agreed=partial(agree_on_list, side="send"),
    put=pack_all,
    room=lambda call, flat: np.empty(call.size * flat.size, flat.dtype),
    take=unpack_all,
)
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: GroupLike = None,
    async_op: bool = False,
) -> Any:
    """Gather each of several arrays of every rank, by one call for all of them.

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
        TypeError: Not lists of arrays, different or unsupported dtypes.
        ValueError: Lists of wrong length, wrong shapes, or outputs that cannot be written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    lists = unchained(members, all_gather_coalesced, output_tensor_lists, input_tensor_list, side="recv", by_rank=True)
    work = members.submit(all_gather_coalesced, input_tensor_list, lists, None, None, async_op)
    return work if async_op or work is None else output_tensor_lists
