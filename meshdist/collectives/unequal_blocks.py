"""Gathers of blocks whose shapes differ from rank to rank: the shapes first, then the blocks.

Every rank gets all shapes, also where only one gets the blocks, so that all raise if they do not fit.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.device_types import new_empty, taken
from meshdist.arrays.host import check_dtype
from meshdist.arrays.trees import Tree, is_tree
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_to_all import all_to_all
from meshdist.collectives.dimensions import dimension, given_array
from meshdist.collectives.objects import submit
from meshdist.errors import DistBackendError
from meshdist.runtime.context import GroupLike, resolve
from meshdist.runtime.rank_text import call_rank

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.runtime.call import Call
    from meshdist.runtime.interfaces import Group

_MOST_STRUCTURES = 256


class _Outline:
    """The dtype of an array and how many dimensions it has, for the text of a tree."""

    def __init__(self, x: Any, name: str) -> None:
        array = taken(x, name)
        self.dtype, self.shape = array.dtype, (":",) * array.ndim


def gathered_unequal(
    x: Any, group: GroupLike, axis: int | None, dim: int | None, of: str, root: int | None = None
) -> Any:
    """Return the arrays or trees of all ranks, in a list, or concatenated along a dimension of unequal lengths.

    For the user's function `of`, all_gather, or gather to the rank `root` of the group; elsewhere the result is None.

    Raises:
        DistBackendError: Blocks to be concatenated differ in another dimension; all ranks raise.
    """
    members = resolve(group)
    tree = Tree(x if is_tree(x) else given_array(x, of, group))
    for leaf, name in zip(tree.leaves, tree.names, strict=True):
        if isinstance(leaf, np.ndarray):
            members.named(members.error_prefix(of), check_dtype, leaf, name)
    is_joined = axis is not None or dim is not None
    places = [dimension(members, of, leaf, axis, dim) if is_joined else None for leaf in tree.leaves]
    shapes = _shapes_of_all(members, of, Tree(x, leaf=_Outline).text, tree.leaves)
    for name, of_ranks, place in zip(tree.names, shapes, places, strict=True):
        if place is not None:
            _check_others(members, of, name, of_ranks, place)
    takes = root in (None, members.rank())
    made = [
        _Blocks(leaf, of_ranks, place) if takes else None
        for leaf, of_ranks, place in zip(tree.leaves, shapes, places, strict=True)
    ]
    for leaf, blocks in zip(tree.leaves, made, strict=True):
        _exchange(members, of, leaf, blocks, root)
    found = [blocks for blocks in made if blocks is not None]
    if not takes:
        return None
    if is_joined:
        return tree.rebuilt([blocks.whole for blocks in found])
    return [tree.rebuilt([blocks.parts[rank] for blocks in found]) for rank in range(max(0, members.size()))]


class _Blocks:
    """Room for the blocks of all ranks, of these shapes; in one array if they are concatenated along `place`."""

    def __init__(self, like: Any, shapes: list[tuple[int, ...]], place: int | None) -> None:
        if place is None:
            self.whole = None
            self.parts = [new_empty(shape, like) for shape in shapes]
            return
        # 0-d arrays are stacked.
        lengths = [shape[place] if shape else 1 for shape in shapes]
        shape = (*like.shape[:place], sum(lengths), *like.shape[place + 1 :])
        self.whole = whole = new_empty(shape, like)
        ends = np.cumsum([0, *lengths]).tolist()
        cut = [whole[(slice(None),) * place + (slice(start, end),)] for start, end in pairwise(ends)]
        self.parts = [part.reshape(shape) for part, shape in zip(cut, shapes, strict=True)] if not like.shape else cut


def _exchange(members: Group, of: str, block: Any, blocks: _Blocks | None, root: int | None) -> None:
    if root is None:
        assert blocks is not None, "all ranks get the blocks"
        members.submit(all_gather, block, blocks.parts)
        return
    nothing, ranks = new_empty((0,), block), range(max(0, members.size()))
    give = [block if rank == root else nothing for rank in ranks]
    take = [new_empty((0,), block) for _ in ranks] if blocks is None else blocks.parts
    members.submit(_blocks_of(of), give, take)


def _shapes_of_all(members: Group, of: str, text: str, leaves: list[Any]) -> list[list[tuple[int, ...]]]:
    """Return, for each leaf, the shapes of all ranks, whose trees must have this text."""
    own = np.array([length for leaf in leaves for length in leaf.shape], np.int64)
    rows = np.empty((max(0, members.size()), own.size), np.int64)
    submit(members, _shapes_exchange(of, text), own, rows)
    ends = np.cumsum([0, *(leaf.ndim for leaf in leaves)]).tolist()
    return [[tuple(row[start:end]) for row in rows.tolist()] for start, end in pairwise(ends)]


def _check_others(members: Group, of: str, name: str, shapes: list[tuple[int, ...]], place: int) -> None:
    """Raise DistBackendError if shapes differ in another dimension than `place`."""
    others = [shape[:place] + shape[place + 1 :] for shape in shapes]
    for rank, other in enumerate(others):
        if other != others[0]:
            first, second = (call_rank(number, members.ranks) for number in (0, rank))
            raise DistBackendError(
                f"{name} must have the same shape on all ranks except in dimension {place}, along which the blocks are"
                f" concatenated; {first} has {shapes[0]} and {second} has {shapes[rank]}",
                error_prefix=members.error_prefix(of),
            )


@lru_cache(_MOST_STRUCTURES)  # plans are kept by the collective
def _shapes_exchange(of: str, text: str) -> Collective[..., Any]:
    return all_gather_into_tensor.under(of, lambda call: (text, "uneven"), is_size_exchange=True)


def _agreed_blocks(call: Call) -> tuple[Any, ...]:
    return ("blocks of unequal lengths",)


@lru_cache(_MOST_STRUCTURES)
def _blocks_of(of: str) -> Collective[..., Any]:
    return all_to_all.under(of, _agreed_blocks)
