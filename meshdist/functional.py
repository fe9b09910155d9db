"""The collectives as functions from arrays to new arrays: `y = all_reduce(x)` does not change `x`.

They take the arguments of the functions of the same names in `meshdist` except the outputs, which they return.

Example:
    >>> import numpy as np
    >>> import meshdist as dist
    >>> from meshdist import functional
    >>> def main():
    ...     x = np.ones(2)
    ...     y = functional.all_reduce(x)
    ...     return x.tolist(), y.tolist()
    >>> dist.run(main, 2)
    [([1.0, 1.0], [2.0, 2.0]), ([1.0, 1.0], [2.0, 2.0])]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.arrays.host import Array
from meshdist.arrays.new_arrays import new_empty, taken
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.collectives.all_gather import all_gather as _all_gather
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor as _all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce as _all_reduce
from meshdist.collectives.all_to_all import all_to_all as _all_to_all
from meshdist.collectives.all_to_all_single import all_to_all_single as _all_to_all_single
from meshdist.collectives.broadcast import broadcast as _broadcast
from meshdist.collectives.gather import gather as _gather
from meshdist.collectives.reduce import reduce as _reduce
from meshdist.collectives.reduce_scatter import reduce_scatter as _reduce_scatter
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor as _reduce_scatter_tensor
from meshdist.collectives.scan import exscan as _exscan
from meshdist.collectives.scan import scan as _scan
from meshdist.collectives.scatter import scatter as _scatter
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "exscan",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scan",
    "scatter",
]


def _copy(x: Any) -> Any:
    return taken(x).copy()


def _blank(x: Any) -> Any:
    array = taken(x)
    return new_empty(array.shape, array)


def all_reduce(x: Any, op: Op = ReduceOp.SUM, group: GroupLike = None) -> Array:
    """Return the reduction of `x` over the group, on all ranks."""
    y: Array = _copy(x)
    _all_reduce(y, op, group)
    return y


def scan(x: Any, op: Op = ReduceOp.SUM, group: GroupLike = None) -> Array:
    """Return the reduction of `x` over the ranks up to this one."""
    y: Array = _copy(x)
    _scan(y, op, group)
    return y


def exscan(x: Any, op: Op = ReduceOp.SUM, group: GroupLike = None) -> Array:
    """Return the reduction of `x` over the ranks before this one; on the first rank, the identity of `op`."""
    y: Array = _copy(x)
    _exscan(y, op, group)
    return y


def broadcast(x: Any, src: int | None = None, group: GroupLike = None, group_src: int | None = None) -> Array:
    """Return the array of the rank `src`; elsewhere `x` gives its shape and dtype."""
    y: Array = _copy(x)
    _broadcast(y, src, group, group_src=group_src)
    return y


def reduce(
    x: Any, dst: int | None = None, op: Op = ReduceOp.SUM, group: GroupLike = None, group_dst: int | None = None
) -> Array:
    """Return, on the rank `dst`, the reduction of `x` over the group; elsewhere a copy of `x`."""
    y: Array = _copy(x)
    _reduce(y, dst, op, group, group_dst=group_dst)
    return y


def all_gather(x: Any, group: GroupLike = None) -> list[Array]:
    """Return the arrays of all ranks, which have the shape of `x`, in rank order."""
    blocks = [_blank(x) for _ in range(resolve(group).size())]
    _all_gather(blocks, x, group)
    return blocks


def all_gather_into_tensor(x: Any, group: GroupLike = None) -> Array:
    """Return the arrays of all ranks concatenated along dim 0; 0-d arrays are stacked."""
    array, size = taken(x), resolve(group).size()
    shape = (max(0, size) * array.shape[0], *array.shape[1:]) if array.ndim else (max(0, size),)
    y: Array = new_empty(shape, array)
    _all_gather_into_tensor(y, array, group)
    return y


def gather(x: Any, dst: int | None = None, group: GroupLike = None, group_dst: int | None = None) -> list[Array] | None:
    """Return, on the rank `dst`, the arrays of all ranks, which have the shape of `x`; elsewhere None."""
    members = resolve(group)
    root = members.root_or_first("gather", "dst", dst, group_dst)
    blocks = [_blank(x) for _ in range(members.size())] if members.rank() == root >= 0 else None
    _gather(x, blocks, group=group, group_dst=root)
    return blocks


def scatter(
    x: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
) -> Array:
    """Return this rank's array out of the list of the rank `src`; `x` gives its shape and dtype."""
    y: Array = _blank(x)
    _scatter(y, scatter_list, src, group, group_src=group_src)
    return y


def reduce_scatter(x: Sequence[Any], op: Op = ReduceOp.SUM, group: GroupLike = None) -> Array:
    """Return the reduction over the group of the arrays at this rank's place in the lists `x`."""
    place = resolve(group).rank()
    if not 0 <= place < len(x):
        raise ValueError(f"reduce_scatter: x must hold an array for each rank, also for rank {place}, got {len(x)}")
    y: Array = _blank(x[place])
    _reduce_scatter(y, x, op, group)
    return y


def reduce_scatter_tensor(x: Any, op: Op = ReduceOp.SUM, group: GroupLike = None) -> Array:
    """Return this rank's rows of the reduction of `x` over the group.

    Raises:
        ValueError: Dim 0 of `x` is no multiple of the group's size.
    """
    array, size = taken(x), resolve(group).size()
    if array.ndim == 0 or array.shape[0] % size:
        raise ValueError(f"reduce_scatter_tensor: dim 0 of x must be a multiple of {size} ranks, got {array.shape}")
    y: Array = new_empty((array.shape[0] // size, *array.shape[1:]), array)
    _reduce_scatter_tensor(y, array, op, group)
    return y


def all_to_all(x: Sequence[Any], group: GroupLike = None) -> list[Array]:
    """Send `x[i]` to rank i, and return the arrays that the ranks send to this one, in rank order.

    The array from rank i must have the shape of `x[i]`.
    """
    blocks = [_blank(block) for block in x]
    _all_to_all(blocks, x, group)
    return blocks


def all_to_all_single(
    x: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Array:
    """Send blocks of rows of `x` to all ranks, and return the rows that they send to this one.

    It receives as many rows as it sends, unless `output_split_sizes` has the numbers.
    """
    array = taken(x)
    rows = array.shape[:1] if output_split_sizes is None else (int(sum(output_split_sizes)),)
    y: Array = new_empty((*rows, *array.shape[1:]), array)
    _all_to_all_single(y, array, output_split_sizes, input_split_sizes, group)
    return y
