"""scatter: every rank gets an array of one rank's list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from meshdist.arrays.device_types import taken
from meshdist.arrays.host import AnyArray, OutputOrWork
from meshdist.collectives.algorithms.rooted import star_scatter
from meshdist.collectives.checks import agree_on_one, check_blocks_alike, check_no_list, check_one_dtype, many, one
from meshdist.collectives.dataflow import SCATTER
from meshdist.collectives.definition import collective
from meshdist.collectives.dimensions import cut_along, dimension
from meshdist.runtime.call import Call
from meshdist.runtime.context import GroupLike, resolve
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group


def check(call: Call) -> None:
    tensor = one(call, "recv")
    if call.rank != call.root:
        check_no_list(call, "send", "src")
        return
    check_blocks_alike(call, many(call, "send"), "scatter_list", tensor, "tensor")
    check_one_dtype(call)


@collective(
    names=("scatter_list", "tensor"),
    check=check,
    agreed=partial(agree_on_one, side="recv"),
    default=star_scatter,
    dataflow=SCATTER,
    lists=("send",),
)
def scatter(
    tensor: AnyArray,
    scatter_list: Sequence[AnyArray] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> OutputOrWork:
    """Scatter the list of one rank: each rank gets the array at its index.

    Args:
        tensor: Output; all ranks must pass the same number of elements and the same dtype.
        scatter_list: Input. On the source: one array for each rank, of the shape of `tensor`. Elsewhere None.
        src: Global rank of the source; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.
        group_src: The source's rank in the group, instead of `src`. Without either it is the group's first rank.

    Returns:
        `tensor`; with `async_op` the Work.

    Raises:
        TypeError: An argument is not an array, or the dtypes differ or are unsupported.
        ValueError: Both `src` and `group_src` are given, or the source is not a member; `scatter_list` is given on a
            rank that is not the source, has the wrong length, or holds arrays of the wrong shape; `tensor` cannot be
            written.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    root = members.root_or_first("scatter", "src", src, group_src)
    return members.submit(scatter, scatter_list, tensor, None, root, async_op)


def blocks_to_scatter(members: Group, whole: Any, block: Any, axis: int | None, dim: int | None) -> list[Any] | None:
    """Return the blocks of `whole`, which is None except on the source, each of the shape of `block`.

    Raises:
        ValueError: The shape of `whole` does not fit.
    """
    place = dimension(members, "scatter", block, axis, dim)
    return None if whole is None else _cut_whole(members, whole, block, place)


def _cut_whole(members: Group, whole: Any, block: Any, place: int) -> list[Any]:
    """Return the blocks of `whole` along dimension `place`, each of the shape of `block`."""
    prefix, size = members.error_prefix("scatter"), max(1, members.size())
    array = members.named(prefix, taken, whole, "scatter_list") if members.rank() >= 0 else taken(whole)
    shape = block.shape
    if not shape:
        expected: tuple[int, ...] = (size,)
    else:
        expected = (*shape[:place], size * shape[place], *shape[place + 1 :])
    if array.shape != expected:
        raise ValueError(
            f"{prefix}: scatter_list must have shape {expected}, {counted(size, 'block')} of the shape of x along"
            f" dimension {place}, got {array.shape}"
        )
    return [part.reshape(shape) for part in cut_along(array, place, size)]
