"""Trees of parameters, in place: copied from one rank to all, or averaged; few calls, whatever the number of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdist.arrays.host import check_writable
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.arrays.trees import Tree
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.broadcast import broadcast
from meshdist.collectives.tree_calls import reduced
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike


def broadcast_parameters(tree: Any, group: GroupLike = None, src: int = 0) -> Any:
    """Copy the arrays of one rank into those of all others, in place; all ranks call it, before training.

    Args:
        tree: Arrays of any dtypes, in dicts, lists and tuples within each other; None counts as nothing. All ranks must
            pass the same structure, with the same dtypes and shapes.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        src: Global rank of the source.

    Returns:
        `tree`.

    Raises:
        TypeError: A number, which cannot be written in place, or something else that is no array.
        ValueError: An array is read-only, or `src` is not in the group.
        DistBackendError: The ranks' trees differ, or a rank failed.

    Example:
        >>> import meshdist as dist
        >>> from meshdist.parallel import broadcast_parameters
        >>> def main():
        ...     layers = [{"w": np.full(2, dist.get_rank()), "b": np.full(1, 0.5 * dist.get_rank())}]
        ...     broadcast_parameters(layers, src=1)
        ...     return layers
        >>> dist.run(main, 2)[0]
        [{'w': array([1, 1]), 'b': array([0.5])}]
    """
    members = resolve(group)
    root = members.root("broadcast_parameters", "src", src, None)
    leaves = _writable_leaves(members, "broadcast_parameters", tree)
    result = reduced(broadcast, tree, None, members, root)
    if members.rank() != root:
        _write(leaves, result)
    return tree


def average_parameters(tree: Any, group: GroupLike = None) -> Any:
    """Replace the arrays of all ranks by their mean over the group, in place; all ranks call it.

    Args:
        tree: As for `broadcast_parameters`; the arrays are floating or complex.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Returns:
        `tree`.

    Raises:
        TypeError: A number, an array of integers, or something else that is no array.
        ValueError: An array is read-only.
        DistBackendError: The ranks' trees differ, or a rank failed.

    Example:
        >>> import meshdist as dist
        >>> from meshdist.parallel import average_parameters
        >>> dist.run(lambda: average_parameters({"w": np.full(2, 1.0 * dist.get_rank())}), 2)[1]
        {'w': array([0.5, 0.5])}
    """
    members = resolve(group)
    leaves = _writable_leaves(members, "average_parameters", tree)
    _write(leaves, reduced(all_reduce, tree, ReduceOp.AVG, members))
    return tree


def _writable_leaves(members: ProcessGroup, of: str, tree: Any) -> list[Any]:
    prefix = members.error_prefix(of)
    taken: Tree = members.named(prefix, Tree, tree, "tree")
    for name, given in _given(tree, "tree"):
        if isinstance(given, (bool, int, float, complex, np.generic)):
            raise TypeError(f"{prefix}: {name} is a number, which cannot be written in place; pass an array of it")
    for leaf, name in zip(taken.leaves, taken.names, strict=True):
        if isinstance(leaf, np.ndarray):
            members.named(prefix, check_writable, leaf, name)
    return taken.leaves


def _given(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the leaves of a tree as they were given, with their names."""
    if isinstance(tree, dict):
        return [pair for key, value in tree.items() for pair in _given(value, f"{name}[{key!r}]")]
    if isinstance(tree, (list, tuple)):
        return [pair for number, value in enumerate(tree) for pair in _given(value, f"{name}[{number}]")]
    return [(name, tree)]


def _write(leaves: list[Any], result: Any) -> None:
    for leaf, new in zip(leaves, Tree(result).leaves, strict=True):
        leaf[...] = new
