"""The collectives as functions from arrays to new arrays: `y = all_reduce(x)` does not change `x`.

They take the arguments of the functions of the same names in `meshdist` except the outputs, which they return.

Trees: instead of an array, `all_reduce`, `reduce`, `scan`, `exscan`, `broadcast`, `all_gather`,
`all_gather_into_tensor` and `gather` take a number, or nested lists, tuples and dicts of arrays and numbers, and return
the same structure, and `scatter` takes one for each rank. The leaves of each dtype travel in one call. Numbers come
back as NumPy scalars, of int64, float64, complex128 or bool; None stays None. If the ranks' structures differ, or the
dtypes or shapes of their leaves, all ranks raise DistBackendError.

Dimensions: `axis=`, or torch's spelling `dim=`, is the dimension along which gathers concatenate and scatters
split; it may be negative.

Blocks of unequal lengths: `all_gather` and `gather` take them with `uneven=True`, and `scatter` as a list.

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
    >>> dist.run(lambda: functional.all_reduce({"loss": 0.5, "grads": [np.ones(2), np.ones(1)]}), 2)[0]
    {'loss': np.float64(1.0), 'grads': [array([2., 2.]), array([2.])]}
    >>> dist.run(lambda: functional.all_gather_into_tensor(np.eye(2), axis=1), 2)[0]
    array([[1., 0., 1., 0.],
           [0., 1., 0., 1.]])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import AnyArray, Array, ArrayTree
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.arrays.trees import is_tree
from meshdist.collectives.all_gather import all_gather as _all_gather
from meshdist.collectives.all_reduce import all_reduce as _all_reduce
from meshdist.collectives.all_reduce import all_reduced
from meshdist.collectives.all_to_all import all_to_all as _all_to_all
from meshdist.collectives.all_to_all_single import all_to_all_along
from meshdist.collectives.broadcast import broadcast as _broadcast
from meshdist.collectives.dimensions import check_list, dimension, equal_blocks, given_array, joined_along
from meshdist.collectives.reduce import reduce as _reduce
from meshdist.collectives.reduce_scatter import reduce_scatter as _reduce_scatter
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor as _reduce_scatter_tensor
from meshdist.collectives.scan import exscan as _exscan
from meshdist.collectives.scan import scan as _scan
from meshdist.collectives.scatter import blocks_to_scatter
from meshdist.collectives.scatter import scatter as _scatter
from meshdist.collectives.scattered_trees import scattered
from meshdist.collectives.tree_calls import gathered, gathered_along, gathered_on, reduced
from meshdist.collectives.unequal_blocks import gathered_unequal
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike
from meshdist.system.name_hints import explaining

__all__ = [
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "exscan",
    "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scan", "scatter",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


def all_reduce(x: ArrayTree, op: Op = ReduceOp.SUM, group: GroupLike = None) -> ArrayTree:
    """Return the reduction of `x` over the group, on all ranks.

    Args:
        x: An array, a number, or a tree of them; the same structure, shapes and dtypes on all ranks. It is not changed.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Returns:
        A new array or tree with the structure and dtypes of `x`.

    Raises:
        TypeError: `x` is not an array or a tree, or a dtype is unsupported or undefined for `op`.
        ValueError: `op` is unknown.
        DistBackendError: A rank failed, or the ranks' calls or trees disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    if is_tree(x):
        return reduced(_all_reduce, x, op, group)
    return all_reduced(given_array(x, "all_reduce", group), op, group)


def scan(x: ArrayTree, op: Op = ReduceOp.SUM, group: GroupLike = None) -> ArrayTree:
    """Return the reduction of `x` over the ranks up to and including this one, in rank order.

    Args:
        x: An array, a number, or a tree of them; the same structure, shapes and dtypes on all ranks. It is not changed.
        op: The reduction: a ReduceOp other than AVG, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Returns:
        A new array or tree with the structure and dtypes of `x`.

    Raises:
        TypeError: `x` is not an array or a tree, or a dtype is unsupported or undefined for `op`.
        ValueError: `op` is unknown or AVG.
        DistBackendError: A rank failed, or the ranks' calls or trees disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    if is_tree(x):
        return reduced(_scan, x, op, group)
    y: Array = given_array(x, "scan", group).copy()
    _scan(y, op, group)
    return y


def exscan(x: ArrayTree, op: Op = ReduceOp.SUM, group: GroupLike = None) -> ArrayTree:
    """Return the reduction of `x` over the ranks before this one, in rank order.

    Args:
        x: An array, a number, or a tree of them; the same structure, shapes and dtypes on all ranks. It is not changed.
        op: The reduction: a ReduceOp other than AVG, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Returns:
        A new array or tree with the structure and dtypes of `x`. On the first rank it holds the identity of `op`, such
        as 0 for SUM.

    Raises:
        TypeError: `x` is not an array or a tree, or a dtype is unsupported or undefined for `op`.
        ValueError: `op` is unknown or AVG.
        DistBackendError: A rank failed, or the ranks' calls or trees disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    if is_tree(x):
        return reduced(_exscan, x, op, group)
    y: Array = given_array(x, "exscan", group).copy()
    _exscan(y, op, group)
    return y


def broadcast(x: ArrayTree, src: int | None = None, group: GroupLike = None, group_src: int | None = None) -> ArrayTree:
    """Return the array or tree of one rank, on all ranks.

    Args:
        x: An array, a number, or a tree of them. On the source, the values to send; elsewhere, only its structure,
            shapes and dtypes are used, which must be those of the source.
        src: Global rank of the source.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        group_src: The source's rank in the group, instead of `src`.

    Returns:
        A new array or tree with the values of the source.

    Raises:
        TypeError: `x` is not an array or a tree, or a dtype is unsupported.
        ValueError: Both or neither of `src` and `group_src` are given, or the source is not a member.
        DistBackendError: A rank failed, or the ranks' calls or trees disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    if is_tree(x):
        return reduced(_broadcast, x, None, group, resolve(group).root("broadcast", "src", src, group_src))
    y: Array = given_array(x, "broadcast", group).copy()
    _broadcast(y, src, group, group_src=group_src)
    return y


def reduce(
    x: ArrayTree, dst: int | None = None, op: Op = ReduceOp.SUM, group: GroupLike = None, group_dst: int | None = None
) -> ArrayTree:
    """Return the reduction of `x` over the group on one rank.

    Args:
        x: An array, a number, or a tree of them; the same structure, shapes and dtypes on all ranks. It is not changed.
        dst: Global rank of the destination.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        group_dst: The destination's rank in the group, instead of `dst`.

    Returns:
        On the destination a new array or tree, the reduction. Elsewhere None.

    Raises:
        TypeError: `x` is not an array or a tree, or a dtype is unsupported or undefined for `op`.
        ValueError: Both or neither of `dst` and `group_dst` are given, the destination is not a member, or `op` is
            unknown.
        DistBackendError: A rank failed, or the ranks' calls or trees disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    root = members.root("reduce", "dst", dst, group_dst)
    if is_tree(x):
        total = reduced(_reduce, x, op, group, root)
    else:
        total = given_array(x, "reduce", group).copy()
        _reduce(total, op=op, group=group, group_dst=root)
    return total if members.rank() == root else None


@overload
def all_gather(
    x: ArrayTree, group: GroupLike = None, *, axis: None = None, dim: None = None, uneven: bool = False
) -> list[ArrayTree]: ...
@overload
def all_gather(
    x: ArrayTree, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None, uneven: bool = False
) -> ArrayTree: ...
def all_gather(
    x: ArrayTree, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None, uneven: bool = False
) -> ArrayTree:
    """Return the arrays or trees of all ranks, on all ranks.

    Args:
        x: An array, a number, or a tree of them; the same structure, shapes and dtypes on all ranks. It is not changed.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        axis: The dimension along which to concatenate; negative ones count from the last. None: return a list.
        dim: The same, by torch's name.
        uneven: The lengths of the ranks' blocks along the dimension differ; without a dimension, any of their lengths
            may. The ranks exchange the lengths first, and there is one call for each array of a tree.

    Returns:
        A list of the ranks' arrays or trees, in rank order. With `axis` or `dim`, they are concatenated instead, as by
        `all_gather_into_tensor`.

    Raises:
        TypeError: `x` is not an array or a tree, a dtype is unsupported, or the dimension is not an integer.
        ValueError: `x` does not have that dimension, or both `axis` and `dim` are given.
        DistBackendError: A rank failed, or the ranks' calls or trees disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    if uneven:
        return gathered_unequal(x, group, axis, dim, "all_gather")
    if axis is not None or dim is not None:
        return gathered_along(x, group, axis, dim, "all_gather")
    if is_tree(x):
        return gathered(x, group)
    array = given_array(x, "all_gather", group)
    blocks = [new_empty(array.shape, array) for _ in range(resolve(group).size())]
    _all_gather(blocks, x, group)
    return blocks


def all_gather_into_tensor(
    x: ArrayTree, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None
) -> ArrayTree:
    """Return the arrays of all ranks concatenated, on all ranks.

    Args:
        x: An array, a number, or a tree of them; the same structure, shapes and dtypes on all ranks. It is not changed.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        axis: The dimension along which to concatenate; negative ones count from the last. None: dimension 0.
        dim: The same, by torch's name.

    Returns:
        A new array: those of all ranks in rank order, concatenated; 0-d arrays are stacked. For a tree, a tree whose
        leaves are concatenated.

    Raises:
        TypeError: `x` is not an array or a tree, a dtype is unsupported, or the dimension is not an integer.
        ValueError: `x` does not have that dimension, or both `axis` and `dim` are given.
        DistBackendError: A rank failed, or the ranks' calls or trees disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    return gathered_along(x, group, axis, dim, "all_gather_into_tensor")


def gather(
    x: ArrayTree,
    dst: int | None = None,
    group: GroupLike = None,
    group_dst: int | None = None,
    *,
    axis: int | None = None,
    dim: int | None = None,
    uneven: bool = False,
) -> ArrayTree:
    """Return the arrays or trees of all ranks on one rank.

    Args:
        x: An array, a number, or a tree of them; the same structure, shapes and dtypes on all ranks. It is not changed.
        dst: Global rank of the destination.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        group_dst: The destination's rank in the group, instead of `dst`. Without either it is the group's first rank.
        axis: The dimension along which to concatenate; negative ones count from the last. None: return a list.
        dim: The same, by torch's name.
        uneven: As in `all_gather`.

    Returns:
        On the destination a list of the ranks' arrays or trees, in rank order, or, with `axis` or `dim`, one array or
        tree, concatenated along that dimension; 0-d arrays are stacked. Elsewhere None.

    Raises:
        TypeError: `x` is not an array or a tree, a dtype is unsupported, or the dimension is not an integer.
        ValueError: `x` does not have that dimension; both `axis` and `dim`, or both `dst` and `group_dst` are given;
            the destination is not a member.
        DistBackendError: A rank failed, or the ranks' calls or trees disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    root = members.root_or_first("gather", "dst", dst, group_dst)
    if uneven:
        return gathered_unequal(x, group, axis, dim, "gather", root)
    return gathered_on(x, group, root, axis, dim)


def scatter(
    x: ArrayTree,
    scatter_list: Sequence[AnyArray] | AnyArray | None = None,
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
    *,
    axis: int | None = None,
    dim: int | None = None,
) -> ArrayTree:
    """Distribute what one rank has over the group, and return this rank's block.

    The blocks are given in one of two forms. In the first, only the source passes something: the blocks as `x`, and the
    other ranks None. They learn from the source what they receive, which takes two more calls. In the second, torch's,
    the blocks are `scatter_list`, and all ranks know their shape and dtype.

    Args:
        x: On the source, a list of one block for each rank: arrays, numbers or trees, which may differ in shape; or,
            with `axis` or `dim`, an array or tree that is split along that dimension. Elsewhere None. With
            `scatter_list`, on all ranks: an array with the shape and dtype of the result; its values are not used.
        scatter_list: On the source: one array for each rank, with the shape of `x`; or, with `axis` or `dim`, one
            array that is split along that dimension. Elsewhere None.
        src: Global rank of the source.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        group_src: The source's rank in the group, instead of `src`. Without either it is the group's first rank.
        axis: The dimension along which the array of the source is split into equal blocks; negative ones count from the
            last. None: the source passes a list.
        dim: The same, by torch's name.

    Returns:
        A new array or tree: the block of this rank. In a dry run of the first form, None on other ranks than the
        source.

    Raises:
        TypeError: The source passes no list, or an array without `axis`; a block is not an array or a tree; the dtypes
            differ or are unsupported; or `axis` is not an integer.
        ValueError: The array does not have that dimension, or its length is not a multiple of the group's size; both
            `axis` and `dim`, or both `src` and `group_src` are given; the source is not a member; the blocks are given
            on another rank, are not as many as the ranks, or do not have the shape of `x`.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.

    Example:
        >>> import meshdist as dist
        >>> from meshdist import functional
        >>> def main():
        ...     blocks = [[1.0], [2.0, 3.0]] if dist.get_rank() == 0 else None
        ...     return functional.scatter(blocks)
        >>> dist.run(main, 2)
        [[np.float64(1.0)], [np.float64(2.0), np.float64(3.0)]]
    """
    members = resolve(group)
    root = members.root_or_first("scatter", "src", src, group_src)
    is_source = members.rank() == root
    if not is_source and (is_tree(x) or (x is None and scatter_list is not None)):
        raise ValueError(
            f"{members.error_prefix('scatter')}: the blocks are for the source, rank {root} of the group; pass None on"
            " the others"
        )
    if x is None or (is_source and scatter_list is None):
        return scattered(scatter_list if x is None else x, group, axis, dim, root)
    array, blocks = given_array(x, "scatter", group), scatter_list
    if axis is not None or dim is not None:
        blocks = blocks_to_scatter(members, scatter_list, array, axis, dim)
    elif blocks is not None and hasattr(blocks, "shape"):
        raise TypeError(
            f"{members.error_prefix('scatter')}: scatter_list must be a list of one array for each rank, got an array"
            f" of shape {blocks.shape}; to split it into equal blocks, pass axis=0"
        )
    y: Array = new_empty(array.shape, array)
    _scatter(y, blocks, src, group, group_src=group_src)
    return y


@explaining
def reduce_scatter(
    x: Sequence[AnyArray] | AnyArray,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    axis: int | None = None,
    dim: int | None = None,
) -> Array:
    """Return this rank's array of the reduction of lists of arrays over the group.

    Args:
        x: One array for each rank; `x[i]` has the same number of elements on all ranks. Or, with `axis` or `dim`, one
            array that is split along that dimension. It is not changed.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        axis: The dimension along which `x` is split into equal blocks; negative ones count from the last. None: `x` is
            a list.
        dim: The same, by torch's name.

    Returns:
        A new array with the shape of `x[rank]`: the reduction of the arrays at this place in the ranks' lists. With
        `axis` or `dim`, the block of this rank, as of `reduce_scatter_tensor`.

    Raises:
        TypeError: An argument is not an array, the dtypes differ, the dtype is unsupported or undefined for `op`, or
            the dimension is not an integer.
        ValueError: The list has the wrong length, or `op` is unknown; `x` does not have that dimension, or its length
            is not a multiple of the group's size; both `axis` and `dim` are given.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    if axis is not None or dim is not None:
        blocks, _ = equal_blocks(x, group, axis, dim, "reduce_scatter")
        block: Array = new_empty(blocks.shape[1:], blocks)
        _reduce_scatter(block, [*blocks], op, group)
        return block
    check_list(x, "reduce_scatter", group)
    place = resolve(group).rank()
    if not 0 <= place < len(x):
        raise ValueError(f"reduce_scatter: x must hold an array for each rank, also for rank {place}, got {len(x)}")
    array = given_array(x[place], "reduce_scatter", group, f"x[{place}]")
    y: Array = new_empty(array.shape, array)
    _reduce_scatter(y, x, op, group)
    return y


def reduce_scatter_tensor(
    x: AnyArray, op: Op = ReduceOp.SUM, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None
) -> Array:
    """Return this rank's block of the reduction of `x` over the group.

    Args:
        x: An array, of the same shape and dtype on all ranks. It is not changed.
        op: The reduction: a ReduceOp, its name in lower case, or `premul_sum(factor)`.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        axis: The dimension along which the result is split into equal blocks; negative ones count from the last. None:
            dimension 0.
        dim: The same, by torch's name.

    Returns:
        A new array: the block of this rank, in rank order.

    Raises:
        TypeError: `x` is not an array, its dtype is unsupported or undefined for `op`, or `axis` is not an integer.
        ValueError: `x` does not have that dimension, or its length is not a multiple of the group's size; both `axis`
            and `dim` are given; `op` is unknown.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    blocks, _ = equal_blocks(x, group, axis, dim, "reduce_scatter_tensor")
    y: Array = new_empty(blocks.shape[1:], blocks)
    _reduce_scatter_tensor(y, blocks, op, group)
    return y


@overload
def all_to_all(
    x: Sequence[AnyArray] | AnyArray, group: GroupLike = None, *, axis: None = None, dim: None = None
) -> list[Array]: ...
@overload
def all_to_all(x: AnyArray, group: GroupLike = None, *, axis: int, dim: None = None) -> Array: ...
@overload
def all_to_all(x: AnyArray, group: GroupLike = None, *, axis: None = None, dim: int) -> Array: ...
@explaining
def all_to_all(
    x: Sequence[AnyArray] | AnyArray, group: GroupLike = None, *, axis: int | None = None, dim: int | None = None
) -> Any:
    """Send `x[i]` to rank i, and return the arrays that the ranks send to this one.

    Args:
        x: One array for each rank, all of one dtype; or, with `axis` or `dim`, one array that is split along that
            dimension. It is not changed.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        axis: The dimension along which `x` is split into equal blocks and the result concatenated; negative ones count
            from the last. None: `x` is a list.
        dim: The same, by torch's name.

    Returns:
        A list of new arrays in rank order; the one from rank i has the shape of `x[i]`. With `axis` or `dim`, they are
        concatenated, as by `all_to_all_single`.

    Raises:
        TypeError: An argument is not an array, the dtypes differ or are unsupported, or the dimension is not an
            integer.
        ValueError: The list has the wrong length; `x` does not have that dimension, or its length is not a multiple of
            the group's size; both `axis` and `dim` are given.
        DistBackendError: A rank failed, the ranks' calls disagree, or the array from rank i does not have as many
            elements as `x[i]`.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    if axis is not None or dim is not None:
        stack, place = equal_blocks(x, group, axis, dim, "all_to_all")
        y = new_empty(stack.shape, stack)
        _all_to_all([*y], [*stack], group)
        return joined_along(y, place)
    check_list(x, "all_to_all", group)
    arrays = [given_array(block, "all_to_all", group, f"x[{place}]") for place, block in enumerate(x)]
    blocks = [new_empty(array.shape, array) for array in arrays]
    _all_to_all(blocks, x, group)
    return blocks


def all_to_all_single(
    x: AnyArray,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    *,
    axis: int | None = None,
    dim: int | None = None,
) -> Array:
    """Send a block of `x` to each rank, and return the blocks that they send to this one, concatenated.

    Args:
        x: An array, of the same dtype on all ranks. It is not changed.
        output_split_sizes: The length of the block from each rank. None: equal blocks, and a result with the shape of
            `x`.
        input_split_sizes: The length of the block for each rank. None: equal blocks.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        axis: The dimension along which `x` is split and the result concatenated; negative ones count from the last.
            None: dimension 0.
        dim: The same, by torch's name.

    Returns:
        A new array: the blocks in rank order.

    Raises:
        TypeError: `x` is not an array, its dtype is unsupported, or the sizes or the dimension are not integers.
        ValueError: `x` does not have that dimension, both `axis` and `dim` are given, or the sizes do not match `x`.
        DistBackendError: A rank failed, or the ranks' calls or sizes disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    array, members = given_array(x, "all_to_all_single", group), resolve(group)
    place = dimension(members, "all_to_all_single", array, axis, dim)
    return all_to_all_along(array, place, output_split_sizes, input_split_sizes, group)


if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import sys

        from meshdist._torch_names import no_attribute

        raise no_attribute(sys.modules[__name__], "functional.", f"module {__name__!r}", name)
