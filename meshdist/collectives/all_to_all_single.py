"""all_to_all_single: every rank sends rows to every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import AnyArray, Array, OutputOrWork, describe_value
from meshdist.collectives.algorithms.pairwise import pairwise_all_to_all
from meshdist.collectives.checks import check_one_dtype, one, refuse
from meshdist.collectives.dataflow import ALL_TO_ALL_SINGLE
from meshdist.collectives.definition import collective
from meshdist.collectives.dimensions import check_even
from meshdist.runtime.call import Call, Elements, Splits, in_words
from meshdist.runtime.context import GroupLike, resolve
from meshdist.system.plurals import counted


def check(call: Call) -> None:
    give, take = one(call, "send"), one(call, "recv")
    check_one_dtype(call)
    if give.ndim == 0 or take.ndim == 0:
        refuse(call, f"input and output must have a dim 0 to split, got shapes {give.shape} and {take.shape}")
    if give.shape[1:] != take.shape[1:]:
        refuse(call, f"input and output must agree in all but dim 0, got shapes {give.shape} and {take.shape}")
    if call.splits is None:
        _check_even(call, give.shape, take.shape)
    else:
        for rows, name, shape in zip(call.splits, ("input", "output"), (give.shape, take.shape), strict=True):
            _check_splits(call, rows, name, shape)


def _check_even(call: Call, give: tuple[int, ...], take: tuple[int, ...]) -> None:
    if give != take:
        refuse(call, f"without split sizes output must have the shape of input, {give}, got {take}")
    if give[0] % call.size:
        refuse(call, f"dim 0 of input must be a multiple of {call.size} ranks, got {give[0]}; or pass split sizes")


def _check_splits(call: Call, rows: tuple[int, ...], name: str, shape: tuple[int, ...]) -> None:
    if len(rows) != call.size or min(rows) < 0 or sum(rows) != shape[0]:
        refuse(
            call,
            f"{name}_split_sizes must be {counted(call.size, 'size')} of at least 0 whose sum is dim 0 of {name},"
            f" {shape[0]}; got {list(rows)}",
        )


def agreed(call: Call) -> tuple[Any, ...]:
    """All ranks exchange one dtype, and either the same number of elements or rows of one size."""
    give = one(call, "send")
    if call.splits is None:
        return (Elements([give]),)
    return (f"{in_words(give.dtype)}[split sizes, rows of {math.prod(give.shape[1:])}]",)


def as_splits(
    output: Sequence[int] | None, input: Sequence[int] | None, give: Any, take: Any, size: int
) -> Splits | None:
    """Return the rows to and from each rank, even ones for a missing list; None if both are missing."""
    to, come = _as_rows("input", input), _as_rows("output", output)
    if to is None and come is None:
        return None
    return to or (len(give) // size,) * size, come or (len(take) // size,) * size


def _as_rows(name: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    # An empty list means even splits, as None does.
    try:
        return tuple(map(index, sizes)) or None if sizes is not None else None
    except TypeError:
        raise TypeError(f"{name}_split_sizes must be a list of integers, got {describe_value(sizes)}") from None


@collective(
    names=("input", "output"), check=check, agreed=agreed, default=pairwise_all_to_all, dataflow=ALL_TO_ALL_SINGLE
)
def all_to_all_single(
    output: AnyArray,
    input: AnyArray,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> OutputOrWork:
    """Send the i-th block of rows of `input` to rank i, and receive from rank i into the i-th block of `output`.

    Args:
        output: Output. Must not overlap `input`.
        input: Input, with the other dims and the dtype of `output`.
        output_split_sizes: Rows from each rank. None: equal numbers.
        input_split_sizes: Rows to each rank. None: equal numbers. If any rank gives split sizes, all must.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.

    Returns:
        `output`; with `async_op` the Work.

    Raises:
        TypeError: An argument is not an array, or the dtypes differ or are unsupported.
        ValueError: The shapes or split sizes do not fit, or the output cannot be written.
        DistBackendError: A rank failed, or the ranks' calls or their split sizes disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    splits = None
    if output_split_sizes is not None or input_split_sizes is not None:
        error_prefix, size = members.error_prefix("all_to_all_single"), members.size()
        splits = members.named(error_prefix, as_splits, output_split_sizes, input_split_sizes, input, output, size)
    return members.submit(all_to_all_single, input, output, None, None, async_op, splits)


def all_to_all_along(
    array: Any, place: int, outputs: Sequence[int] | None, inputs: Sequence[int] | None, group: GroupLike
) -> Array:
    """Return the blocks along dimension `place` that the ranks send to this one, concatenated.

    `outputs` and `inputs` are the lengths of the blocks from and for each rank; equal ones if None.
    """
    first = (place, *(other for other in range(array.ndim) if other != place))  # the divided dimension comes first
    if place and inputs is None:
        check_even(resolve(group), "all_to_all_single", array, place, "; or pass split sizes")
    rows = array.transpose(first) if place else array
    count = rows.shape[:1] if outputs is None else (int(sum(outputs)),)
    y: Array = new_empty((*count, *rows.shape[1:]), array)
    all_to_all_single(y, rows, outputs, inputs, group)
    return y.transpose([first.index(other) for other in range(array.ndim)]).copy() if place else y
