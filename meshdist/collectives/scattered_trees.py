"""Scatter without an output: the source alone has the blocks, and the other ranks learn from it what they receive.

The outline of each block, its structure with dtypes and shapes, is sent first, as an object. The arrays of each dtype
follow in one call.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import check_dtype
from meshdist.arrays.trees import Tree, is_tree
from meshdist.collectives.all_to_all import all_to_all
from meshdist.collectives.dimensions import check_even, cut_along, dimension, given_array
from meshdist.collectives.objects import on_gpu, scattered_object, submit
from meshdist.collectives.scatter import scatter
from meshdist.runtime.context import GroupLike, resolve
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.runtime.call import Call
    from meshdist.runtime.interfaces import Group

_MOST_DTYPES = 64
_FORM = "x on the source, None elsewhere"


def _agreed(call: Call) -> tuple[Any, ...]:
    return (_FORM,)


_outline_sizes = scatter.under("scatter", _agreed, is_size_exchange=True)
_outline_bytes = all_to_all.under("scatter", _agreed, is_size_exchange=True)


class _Kind(NamedTuple):
    """The arrays that one call carries."""

    dtype: np.dtype[Any]
    is_on_gpu: bool


class _Outline(NamedTuple):
    """What a rank receives.

    Attributes:
        structure: The tree, with an empty array of the dtype in place of each array, and with its numbers.
        shapes: The shapes of the leaves, in the order of Tree.
        kinds: The kinds of the leaves.
        calls: The kinds of the arrays of all ranks, in the order of the calls.
    """

    structure: Any
    shapes: list[tuple[int, ...]]
    kinds: list[_Kind]
    calls: list[_Kind]


def scattered(x: Any, group: GroupLike, axis: int | None, dim: int | None, root: int) -> Any:
    """Return this rank's block of `x`, which the rank `root` of the group has, and which is None elsewhere.

    `x` is a list of blocks, arrays or trees; or, with `axis` or `dim`, an array or tree that is split along it.
    """
    members = resolve(group)
    if members.rank() < 0:
        submit(members, _outline_sizes, None, None, None, root)
        return None
    trees: list[Tree] = []
    if members.rank() == root:
        trees = _cut(members, x, axis, dim) if axis is not None or dim is not None else _trees(members, x)
    mine: _Outline | None = scattered_object(members, _outlines(trees), root, _outline_sizes, _outline_bytes)
    if mine is None:  # in a dry run the source does not exist
        return None
    tree, leaves = Tree(mine.structure), dict[int, Any]()
    for kind in mine.calls:
        places = [place for place, other in enumerate(mine.kinds) if other == kind]
        found = _exchanged(members, trees, kind, [mine.shapes[place] for place in places], root)
        leaves.update(zip(places, found, strict=True))
    return tree.rebuilt([leaves[place] for place in range(len(mine.kinds))])


def _trees(members: Group, x: Any) -> list[Tree]:
    """Return the blocks of a list, one for each rank."""
    prefix, size = members.error_prefix("scatter"), members.size()
    if not isinstance(x, (list, tuple)):
        got = f"an array of shape {x.shape}" if hasattr(x, "shape") else type(x).__name__
        hint = "; to split an array into equal blocks, pass axis=0" if hasattr(x, "shape") else ""
        raise TypeError(f"{prefix}: x must be a list of {counted(size, 'block')}, one for each rank, got {got}{hint}")
    if len(x) != size:
        raise ValueError(f"{prefix}: x must hold {counted(size, 'block')}, one for each rank, got {len(x)}")
    trees = [members.named(prefix, Tree, block, f"x[{place}]") for place, block in enumerate(x)]
    for tree in trees:
        for leaf, name in zip(tree.leaves, tree.names, strict=True):
            if isinstance(leaf, np.ndarray):
                members.named(prefix, check_dtype, leaf, name)
    return trees


def _cut(members: Group, x: Any, axis: int | None, dim: int | None) -> list[Tree]:
    """Return the equal blocks of an array or tree along a dimension, one for each rank."""
    of, name = "scatter", "dim" if axis is None else "axis"
    if x is None:
        what = "x must be an array or tree on the source, this rank, got None"
        raise TypeError(f"{members.error_prefix(of)}: {what}")
    whole, blocks = Tree(x if is_tree(x) else given_array(x, of, members)), []
    for leaf in whole.leaves:
        place = dimension(members, of, leaf, axis, dim)
        check_even(members, of, leaf, place, f"; for blocks of unequal lengths, pass a list of them, without {name}=")
        blocks.append(cut_along(leaf, place, members.size()))
    parts = [whole.rebuilt([some[rank] for some in blocks]) for rank in range(members.size())]
    return _trees(members, parts)


def _kind(leaf: Any) -> _Kind:
    is_on_cpu = isinstance(leaf, np.ndarray)
    return _Kind(leaf.dtype.newbyteorder("=") if is_on_cpu else leaf.dtype, not is_on_cpu)


def _outlines(trees: list[Tree]) -> list[_Outline]:
    """Return what each rank receives."""
    kinds = [[_kind(leaf) for leaf in tree.leaves] for tree in trees]
    calls = list(dict.fromkeys(kind for some in kinds for kind in some))
    return [
        _Outline(_structure(tree), [leaf.shape for leaf in tree.leaves], some, calls)
        for tree, some in zip(trees, kinds, strict=True)
    ]


def _structure(tree: Tree) -> Any:
    # A number stays one; what comes in its place does not matter.
    return tree.rebuilt([np.zeros(() if leaf.ndim == 0 else (0,), leaf.dtype) for leaf in tree.leaves])


def _exchanged(members: Group, trees: list[Tree], kind: _Kind, shapes: list[tuple[int, ...]], root: int) -> list[Any]:
    """Return this rank's arrays of a kind, of these shapes."""
    like = np.empty(0, kind.dtype)
    if kind.is_on_gpu:
        like = on_gpu(members, like)
    take = [new_empty((0,), like) for _ in range(members.size())]
    give = [_flat(tree, kind, like) for tree in trees] or take.copy()
    ends = np.cumsum([0, *map(prod, shapes)]).tolist()
    flat = take[root] = new_empty((ends[-1],), like)
    members.submit(_arrays_of(kind), give, take)
    return [flat[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)]


def _flat(tree: Tree, kind: _Kind, like: Any) -> Any:
    """Return the leaves of a kind, one after another."""
    leaves = [leaf for leaf in tree.leaves if _kind(leaf) == kind]
    if len(leaves) == 1 and leaves[0].dtype == like.dtype:
        return leaves[0].reshape(-1)
    flat, end = new_empty((sum(leaf.size for leaf in leaves),), like), 0
    for leaf in leaves:
        flat[end : end + leaf.size] = leaf.reshape(-1)
        end += leaf.size
    return flat


@lru_cache(_MOST_DTYPES)  # plans are kept by the collective
def _arrays_of(kind: _Kind) -> Collective[..., Any]:
    return all_to_all.under("scatter", lambda call: (str(kind.dtype), _FORM))
