"""Collectives of trees, and gathers into new arrays; the leaves of each dtype of a tree travel as one array.

The structure, with the dtypes and shapes of all leaves, is part of what the ranks compare in each call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import check_dtype
from meshdist.arrays.reduce_op import Op, as_reduce_op, check_op_dtype
from meshdist.arrays.trees import Tree, is_tree
from meshdist.collectives.all_gather_into_tensor import all_gather_along, all_gather_into_tensor
from meshdist.collectives.dimensions import dimension, given_array, joined_along, stacked_along
from meshdist.collectives.gather import gather
from meshdist.runtime.context import GroupLike, resolve

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.runtime.interfaces import Group

_MOST_STRUCTURES = 256


class Pack:
    """The leaves of one dtype, on one device, in one flat array."""

    def __init__(self, tree: Tree, places: list[int]) -> None:
        self.places = places
        self._leaves = [tree.leaves[place] for place in places]
        first = self._leaves[0]
        like = np.empty(0, first.dtype.newbyteorder("=")) if isinstance(first, np.ndarray) else first
        self._ends = np.cumsum([leaf.size for leaf in self._leaves]).tolist()
        self.flat = new_empty((self._ends[-1],), like)
        for leaf, part in zip(self._leaves, self._parts(self.flat), strict=True):
            part[...] = leaf

    def leaves(self, flat: Any) -> list[Any]:
        """Return the leaves out of a flat array like that of the pack."""
        parts = zip(self._leaves, self._parts(flat), strict=True)
        return [part if part.dtype == leaf.dtype else part.astype(leaf.dtype) for leaf, part in parts]

    def _parts(self, flat: Any) -> list[Any]:
        ways = zip(self._leaves, self._ends, strict=True)
        return [flat[end - leaf.size : end].reshape(leaf.shape) for leaf, end in ways]


def reduced(collective: Collective[..., Any], x: Any, op: Op | None, group: GroupLike, root: int | None = None) -> Any:
    """Return the tree of the results of a collective that works in place: a reduction, a scan or a broadcast."""
    members = resolve(group)
    tree, packs = _packed(members, collective.name, x, op)
    for number, pack in enumerate(packs):
        members.submit(_of_tree(collective, tree.text, number), pack.flat, pack.flat, op, root)
    return _rebuilt(tree, packs, [pack.flat for pack in packs])


def gathered(x: Any, group: GroupLike, of: str = "all_gather") -> list[Any]:
    """Return the trees of all ranks, for the user's function `of`."""
    members = resolve(group)
    tree, packs = _packed(members, of, x, None)
    size = max(0, members.size())
    stacks = [new_empty((size, pack.flat.size), pack.flat) for pack in packs]
    for number, (pack, stack) in enumerate(zip(packs, stacks, strict=True)):
        members.submit(_of_tree(all_gather_into_tensor, tree.text, number, of), pack.flat, stack)
    return [_rebuilt(tree, packs, [stack[rank] for stack in stacks]) for rank in range(size)]


def gathered_on(x: Any, group: GroupLike, root: int, axis: int | None, dim: int | None) -> Any:
    """Return, on the rank `root` of the group, all arrays or trees, in a list or concatenated; elsewhere None."""
    members, is_joined = resolve(group), axis is not None or dim is not None
    if is_tree(x):
        dims = [dimension(members, "gather", leaf, axis, dim) for leaf in Tree(x).leaves]
        trees = _trees_on(x, members, root)
        return joined_trees(x, trees, dims) if is_joined and trees is not None else trees
    array = given_array(x, "gather", group)
    num_blocks = members.size() if members.rank() == root >= 0 else 0
    if not is_joined:
        blocks = [new_empty(array.shape, array) for _ in range(num_blocks)] or None
        gather(x, blocks, group=group, group_dst=root)
        return blocks
    place, y = dimension(members, "gather", array, axis, dim), new_empty((num_blocks, *array.shape), array)
    gather(x, [y[rank] for rank in range(num_blocks)] or None, group=group, group_dst=root)
    return joined_along(y, place) if num_blocks else None


def _trees_on(x: Any, members: Group, root: int) -> list[Any] | None:
    tree, packs = _packed(members, "gather", x, None)
    ranks = range(members.size()) if members.rank() == root >= 0 else None
    stacks = [None if ranks is None else [new_empty(pack.flat.shape, pack.flat) for _ in ranks] for pack in packs]
    for number, (pack, stack) in enumerate(zip(packs, stacks, strict=True)):
        members.submit(_of_tree(gather, tree.text, number), pack.flat, stack, None, root)
    return None if ranks is None else [_rebuilt(tree, packs, [stack[k] for stack in stacks if stack]) for k in ranks]


def gathered_along(x: Any, group: GroupLike, axis: int | None, dim: int | None, of: str) -> Any:
    """Return the arrays or trees of all ranks concatenated, for the user's function `of`."""
    members = resolve(group)
    if is_tree(x):
        dims = [dimension(members, of, leaf, axis, dim) for leaf in Tree(x).leaves]
        return joined_trees(x, gathered(x, group, of), dims)
    array = given_array(x, of, group)
    place = dimension(members, of, array, axis, dim)
    y = new_empty((max(0, members.size()), *array.shape), array)
    if of == "all_gather":
        members.submit(all_gather_along, array, y)
    else:
        all_gather_into_tensor(y, array, group)
    return joined_along(y, place)


def joined_trees(x: Any, trees: list[Any], dims: list[int]) -> Any:
    """Return one tree like `x`, whose leaves are those of all `trees`, concatenated along a dimension each."""
    tree, leaves = Tree(x), [Tree(other).leaves for other in trees]
    ways = enumerate(zip(tree.leaves, dims, strict=True))
    return tree.rebuilt([stacked_along([some[k] for some in leaves], like, place) for k, (like, place) in ways])


def _packed(members: Group, of: str, x: Any, op: Op | None) -> tuple[Tree, list[Pack]]:
    """Take a tree apart and check all of it, before any of it is sent."""
    prefix = members.error_prefix(of)
    is_member = members.rank() >= 0
    tree: Tree = members.named(prefix, Tree, x) if is_member else Tree(x)
    places: dict[Any, list[int]] = {}
    reduce_op = None if op is None or not is_member else members.named(prefix, as_reduce_op, op)
    for place, (leaf, name) in enumerate(zip(tree.leaves, tree.names, strict=True)):
        is_on_cpu = isinstance(leaf, np.ndarray)
        # The byte order may differ between ranks, which must make the same calls.
        dtype = leaf.dtype.newbyteorder("=") if is_on_cpu and not leaf.dtype.isnative else leaf.dtype
        key = dtype, None if is_on_cpu else leaf.device.id
        if key not in places:  # the first of its dtype
            places[key] = []
            if is_on_cpu:
                members.named(prefix, check_dtype, leaf, name)
            if reduce_op is not None:
                members.named(f"{prefix}: {name}", check_op_dtype, reduce_op, leaf.dtype)
        places[key].append(place)
    if not places:
        # Ranks compare their trees in a call, also those without leaves.
        tree.leaves, tree.names = [np.empty(0)], ["x"]
        places[None] = [0]
    return tree, [Pack(tree, some) for some in places.values()]


def _rebuilt(tree: Tree, packs: list[Pack], flats: list[Any]) -> Any:
    leaves: list[Any] = [None] * len(tree.leaves)
    for pack, flat in zip(packs, flats, strict=True):
        for place, leaf in zip(pack.places, pack.leaves(flat), strict=True):
            leaves[place] = leaf
    return tree.rebuilt(leaves)


@lru_cache(_MOST_STRUCTURES)  # plans are kept by the collective
def _of_tree(collective: Collective[..., Any], text: str, number: int, name: str = "") -> Collective[..., Any]:
    words = text if number == 0 else f"{text}, part {number + 1}"
    return collective.under(name or collective.name, lambda call: (words,))
