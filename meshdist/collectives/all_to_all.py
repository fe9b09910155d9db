"""all_to_all: every rank sends an array to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.collectives.algorithms.pairwise import pairwise_all_to_all
from meshdist.collectives.checks import check_one_dtype, check_same_shape, many
from meshdist.collectives.dataflow import ALL_TO_ALL
from meshdist.collectives.definition import collective
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve


def check(call: Call) -> None:
    give, take = many(call, "send"), many(call, "recv")
    check_one_dtype(call)
    own = call.rank
    check_same_shape(call, take[own], give[own], (f"output_tensor_list[{own}]", f"input_tensor_list[{own}]"))


def agreed(call: Call) -> tuple[Any, ...]:
    """All ranks exchange one dtype; the algorithm compares the sizes pairwise."""
    return (f"a list of {many(call, 'send')[0].dtype}",)


@collective(
    names=("input_tensor_list", "output_tensor_list"),
    check=check,
    agreed=agreed,
    default=pairwise_all_to_all,
    dataflow=ALL_TO_ALL,
    lists=("send", "recv"),
)
def all_to_all(
    output_tensor_list: Sequence[AnyArray],
    input_tensor_list: Sequence[AnyArray],
    group: GroupLike = None,
    async_op: bool = False,
) -> OutputOrWork:
    """Send the i-th array of a list to rank i, and receive from rank i into the i-th array of another list.

    Args:
        output_tensor_list: Output: one array for each rank; `output_tensor_list[i]` has the number of elements that
            rank i sends to this one. Must not overlap the input.
        input_tensor_list: Input: one array for each rank. The sizes may differ.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output_tensor_list`; with `async_op` the Work.

    Raises:
        TypeError: An argument is not an array, or the dtypes differ or are unsupported.
        ValueError: A list has the wrong length, this rank's own array has the wrong shape, or an output cannot be
            written.
        DistBackendError: A rank failed, or the ranks' calls or their sizes disagree; all ranks raise then.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return resolve(group).submit(all_to_all, input_tensor_list, output_tensor_list, None, None, async_op)
