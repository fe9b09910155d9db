"""Cut a batch into micro-batches along dimension 0, and put what was computed together again."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdist.arrays.trees import Tree


def split_microbatches(batch: Any, num_microbatches: int, name: str = "batch") -> list[Any]:
    """Cut arrays along dimension 0 into views of equal size.

    Args:
        batch: An array, or nested lists, tuples and dicts of arrays.
        num_microbatches: The number of micro-batches.
        name: Its name in errors.

    Returns:
        The micro-batches, each with the structure of `batch`.

    Raises:
        TypeError: It contains objects other than arrays.
        ValueError: An array has no dimension 0, or it cannot be cut into equal parts; the message names the sizes.

    Example:
        >>> import numpy as np
        >>> from meshdist.parallel import split_microbatches
        >>> split_microbatches({"x": np.arange(6), "y": np.eye(3).repeat(2, axis=0)}, 3)[1]
        {'x': array([2, 3]), 'y': array([[0., 1., 0.],
               [0., 1., 0.]])}
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    tree = Tree(batch, name)
    for leaf, leaf_name in zip(tree.leaves, tree.names, strict=True):
        if not leaf.ndim:
            raise ValueError(f"{leaf_name} has no dimension to split into {num_microbatches} micro-batches")
        rows = leaf.shape[0]
        if rows % num_microbatches:
            below = rows - rows % num_microbatches
            larger, smaller = below // num_microbatches + 1, below // num_microbatches
            raise ValueError(
                f"{leaf_name} has {rows} rows, which would be {rows - below} micro-batches of {larger} and"
                f" {num_microbatches - (rows - below)} of {smaller}; micro-batches must be equal: pass"
                f" {f'{below} or ' if below else ''}{below + num_microbatches} rows, or use a different number of"
                " micro-batches"
            )
    return [
        tree.rebuilt(
            [
                leaf[number * (leaf.shape[0] // num_microbatches) : (number + 1) * (leaf.shape[0] // num_microbatches)]
                for leaf in tree.leaves
            ]
        )
        for number in range(num_microbatches)
    ]


def merge_microbatches(parts: list[Any]) -> Any:
    """Concatenate micro-batches along dimension 0; numbers and arrays without dimensions are stacked into one array.

    Args:
        parts: The micro-batches, all of one structure.

    Raises:
        TypeError: They contain objects other than arrays.
        ValueError: There are none, or they cannot be concatenated.

    Example:
        >>> import numpy as np
        >>> from meshdist.parallel import merge_microbatches
        >>> merge_microbatches([np.zeros((1, 2)), np.ones((2, 2))])
        array([[0., 0.],
               [1., 1.],
               [1., 1.]])
    """
    if not parts:
        raise ValueError("there are no micro-batches to put together")
    trees = [Tree(part, "part") for part in parts]
    columns = zip(*(tree.leaves for tree in trees), strict=True)
    return trees[0].rebuilt([np.concatenate(leaves) if leaves[0].ndim else np.stack(leaves) for leaves in columns])


def split_keywords(keywords: dict[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Return the keyword arguments of each micro-batch: arrays and trees of them are split, all else is for each."""
    each: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]
    for name, value in keywords.items():
        is_cut = bool(getattr(value, "shape", ())) or isinstance(value, (list, tuple, dict))
        parts = split_microbatches(value, num_microbatches, name) if is_cut else [value] * num_microbatches
        for kw, part in zip(each, parts, strict=True):
            kw[name] = part
    return each
