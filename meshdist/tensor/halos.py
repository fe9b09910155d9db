"""Halos: blocks with ghost rows of their neighbours, and the functions of NumPy that need them."""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from meshdist.arrays.host import label_of
from meshdist.groups.message_exchanges import Terms
from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.runtime.flight_recorder import FIRST_OWN_TAG
from meshdist.tensor.agreement import described
from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.dispatch import begin, implements
from meshdist.tensor.distribution import array_module, as_block
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_keys import along
from meshdist.tensor.moves import group_of
from meshdist.tensor.operands import resolved

_TAG = FIRST_OWN_TAG | 0x68616C6F  # apart from the messages of users


@implements("halo")
def halo(x: DTensor, width: int | Sequence[int], periodic: bool | Sequence[bool] = False) -> Any:
    """Return this rank's block with `width` rows of its neighbours on both sides of every dimension.

    A rank sends only to its neighbours, and only the rows that they need; if a block has fewer rows than `width`, rows
    of more distant ranks are included. Corners are included.

    At an open end of the array there are no ghost rows: the block at the end is that much shorter, as on a dimension
    that is not sharded. With `periodic` the array continues with the rows of its other end, on every dimension,
    sharded or not, so that the rows of all blocks are `before + block + after`, each of `width`.

    Args:
        x: The array. A pending reduction is computed first.
        width: The number of ghost rows on either side, or one number for each dimension.
        periodic: Whether the array is periodic; one value, or one for each dimension.

    Returns:
        A new NumPy or CuPy array: the rows `start - width` to `stop + width` of the whole array for a block of the
        rows `start` to `stop`.

    Raises:
        TypeError: `x` is not a DTensor, a width is not an integer, or `periodic` is neither True nor False.
        ValueError: A width is negative, or there is not one for each dimension.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.tensor import Shard, distribute_tensor, halo
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = distribute_tensor(np.arange(4), mesh, {"dp": Shard(0)})
        ...     return halo(x, 1).tolist(), halo(x, 1, periodic=True).tolist()
        >>> meshdist.run(program, 2)
        [([0, 1, 2], [3, 0, 1, 2]), ([1, 2, 3], [1, 2, 3, 0])]
    """
    begin("halo", x, width, periodic)
    _check_placed("halo", x)
    widths, rings = ghost_widths("halo", x.ndim, width, periodic)
    local = resolved(x).to_local()
    block = with_ghosts("halo", local, x.layout, x.mesh, widths, widths, rings)
    return block.copy() if block is local else block


def _check_placed(name: str, x: Any) -> None:
    if not isinstance(x, DTensor):
        raise TypeError(f"{name}: x must be a DTensor, got {type(x).__name__}; distribute_tensor converts an array")


def map_overlap(
    fn: Callable[[Any], Any], x: DTensor, width: int | Sequence[int], periodic: bool | Sequence[bool] = False
) -> DTensor:
    """Return `fn` of an array whose results depend on at most `width` rows around each element: a stencil.

    `fn` runs on this rank's block with its halo, and its results for the ghost rows are dropped. At open ends, it sees
    the end of the array, as if it ran on the whole array. With `periodic` it is as if it ran on `numpy.pad(x, width,
    "wrap")`, with the ends then dropped.

    Args:
        fn: Takes an array, and returns one of the same shape.
        x: The array. A pending reduction is computed first.
        width: The number of ghost rows, as in `halo`.
        periodic: Whether the array is periodic, as in `halo`.

    Returns:
        A DTensor of the shape and placements of `x`.

    Raises:
        ValueError: The result has a different shape from the argument, a width is negative, or there is not one for
            each dimension.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.tensor import Shard, distribute_tensor, map_overlap
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = distribute_tensor(np.array([1, 5, 2, 4]), mesh, {"dp": Shard(0)})
        ...     return map_overlap(np.maximum.accumulate, x, 3).full().tolist()
        >>> meshdist.run(program, 2)[0]
        [1, 5, 5, 5]
    """
    begin("map_overlap", fn, x, width, periodic)
    _check_placed("map_overlap", x)
    widths, rings = ghost_widths("map_overlap", x.ndim, width, periodic)
    layout = x.layout.resolved()
    local = resolved(x).to_local()
    block = with_ghosts("map_overlap", local, x.layout, x.mesh, widths, widths, rings)
    if block is local:  # fn may write into its argument, or return it
        block = local.copy()
    result = as_block(fn(block), x.mesh, "map_overlap")
    if result.shape != block.shape:
        raise ValueError(
            f"map_overlap: fn must return an array of the shape of its argument, got {result.shape} for"
            f" {block.shape}; use halo, and DTensor.from_local for results of a different shape"
        )
    trimmed = without_ghosts(widths, rings, layout.index(coordinate_in(x.mesh)))
    return wrap(array_module(x.mesh).ascontiguousarray(result[trimmed]) if x.ndim else result, layout, x.mesh)


def ghost_widths(
    name: str, ndim: int, width: int | Sequence[int], periodic: bool | Sequence[bool]
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return the number of ghost rows on either side, and whether the array is a ring, for each dimension."""
    return _per_dimension(name, ndim, _hashable(name, _WIDTH, width), _hashable(name, _PERIODIC, periodic))


_WIDTH = "width must be an integer"
_PERIODIC = "periodic must be True or False"


def without_ghosts(widths: Sequence[int], rings: Sequence[bool], held: Sequence[slice]) -> tuple[slice, ...]:
    """Return the slices that cut the ghost rows off a block with its halo; `held` is the part of the block itself."""
    return tuple(
        slice(first := width if ring else min(width, part.start), first + part.stop - part.start)
        for width, ring, part in zip(widths, rings, held, strict=True)
    )


def _hashable(name: str, wanted: str, value: Any) -> Any:
    if isinstance(value, (int, tuple)):
        return value
    if np.ndim(value):
        return tuple(value)
    if not isinstance(value, Hashable):
        raise _unfit(name, wanted, value)
    return value


def _unfit(name: str, wanted: str, value: Any) -> TypeError:
    return TypeError(f"{name}: {wanted}, or a tuple of one for each dimension, got {value!r}")


@lru_cache(maxsize=1_000)
def _per_dimension(name: str, ndim: int, width: Any, periodic: Any) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    flags = periodic if isinstance(periodic, tuple) else (periodic,) * ndim
    if not all(isinstance(flag, (bool, np.bool_)) or (isinstance(flag, int) and flag in (0, 1)) for flag in flags):
        raise _unfit(name, _PERIODIC, periodic)
    rings = tuple(map(bool, flags))
    try:
        widths = tuple(map(operator.index, width if isinstance(width, tuple) else (width,) * ndim))
    except TypeError:
        raise _unfit(name, _WIDTH, width) from None
    if not len(widths) == len(rings) == ndim:
        raise ValueError(
            f"{name}: width and periodic must be one value, or one per dimension ({ndim}), got {width!r} and"
            f" {periodic!r}"
        )
    if min(widths, default=0) < 0:
        raise ValueError(f"{name}: width must not be negative, got {width!r}")
    return widths, rings


# ---- Exchanging ghost rows


class Piece(NamedTuple):
    """Consecutive rows of a block: the number of the block, and the rows counted from its first."""

    block: int
    start: int
    stop: int


class Ghosts(NamedTuple):
    """What one block exchanges: the pieces before and after it, and the pieces of it that others get, with theirs."""

    before: tuple[Piece, ...]
    after: tuple[Piece, ...]
    given: tuple[tuple[int, Piece], ...]


@lru_cache(maxsize=10_000)
def ghosts_of(sizes: tuple[int, ...], block: int, before: int, after: int, is_ring: bool) -> Ghosts:
    """Return what `block` exchanges, where blocks of these sizes get `before` and `after` rows around them."""
    starts = tuple(accumulate(sizes, initial=0))
    rows = starts[-1]

    def wanted(first: int, last: int) -> tuple[Piece, ...]:
        pieces = []
        if not is_ring:
            first, last = max(first, 0), min(last, rows)
        for turn in range(first // rows, -(-last // rows)) if rows else ():
            low, high = max(first - turn * rows, 0), min(last - turn * rows, rows)
            other = bisect_right(starts, low) - 1
            while low < high:
                stop = min(high, starts[other + 1])
                if low < stop:
                    pieces.append(Piece(other, low - starts[other], stop - starts[other]))
                low, other = stop, other + 1
        return tuple(pieces)

    sides = [
        (wanted(start - before, start), wanted(start + size, start + size + after))
        for start, size in zip(starts, sizes, strict=False)
    ]
    given = tuple(
        (other, piece)
        for other, (ahead, behind) in enumerate(sides)
        for piece in ahead + behind
        if piece.block == block and other != block
    )
    return Ghosts(*sides[block], given)


def with_ghosts(
    of: str,
    local: Any,
    layout: ArrayLayout,
    mesh: DeviceMesh,
    before: Sequence[int],
    after: Sequence[int],
    rings: Sequence[bool],
) -> Any:
    """Return this rank's block with rows before and after it on each dimension; `local` itself where there are none.

    Dimension follows dimension: the rows that a neighbour gives have its own ghost rows already, which makes the
    corners. The user called the function `of`.
    """
    coordinate = coordinate_in(mesh)
    for dim, (ahead, behind, is_ring) in enumerate(zip(before, after, rings, strict=True)):
        cut = layout.cuts[dim] or Cut((), (layout.shape[dim],))
        if not ahead and not behind:
            continue
        at = 0
        for axis in cut.axes:
            at = at * mesh.shape[axis] + coordinate[axis]
        ghosts = ghosts_of(cut.sizes, at, ahead, behind, is_ring)
        if not (ghosts.before or ghosts.after or ghosts.given):
            continue
        widths = tuple(before), tuple(after), tuple(rings)
        terms = _terms(of, layout, dim, at, widths, local.shape, local.dtype, isinstance(local, np.ndarray))
        local = _exchanged(of, local, dim, ghosts, at, group_of(mesh, cut.axes) if cut.axes else None, terms, mesh)
    return local


@lru_cache(maxsize=10_000)
def _terms(
    of: str,
    layout: ArrayLayout,
    dim: int,
    at: int,
    widths: Any,
    shape: tuple[int, ...],
    dtype: Any,
    is_on_cpu: bool,
) -> Terms:
    """Return what the ranks must agree on: one object for each kind of block, by which the core knows its exchange."""
    words = "all ranks of the mesh must call it with the same arguments and with arrays of one layout"
    own_words = f"the array of this rank is {described(layout)}{_width_text(*widths[:2])}"
    label = label_of((), (of, described(layout), dim, widths)) if is_on_cpu else ""
    return Terms(words, label, own_words=own_words)


def _width_text(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    if before != after:  # of a function of NumPy, which has no width
        return ""
    return f", with width {before[0] if len(set(before)) == 1 else before}"


def _exchanged(
    of: str,
    local: Any,
    dim: int,
    ghosts: Ghosts,
    at: int,
    group: ProcessGroup | None,
    terms: Terms,
    mesh: DeviceMesh,
) -> Any:
    def rows(array: Any, start: int, stop: int) -> Any:
        return array[along(dim, slice(start, stop))]

    size = local.shape[dim]
    pieces = (*ghosts.before, Piece(at, 0, size), *ghosts.after)
    whole = local
    if len(pieces) > 1:
        num_rows = sum(piece.stop - piece.start for piece in pieces)
        whole = array_module(mesh).empty((*local.shape[:dim], num_rows, *local.shape[dim + 1 :]), local.dtype)
    received, place = [], 0
    for piece in pieces:
        room = rows(whole, place, place := place + piece.stop - piece.start)
        if piece.block != at:
            received.append((room, piece.block))
        elif whole is not local:
            room[...] = rows(local, piece.start, piece.stop)
    sent = [(rows(local, piece.start, piece.stop), other) for other, piece in ghosts.given]
    if group is not None and (sent or received) and math.prod(local.shape[:dim] + local.shape[dim + 1 :]):
        group.messages.exchange(of, received, sent, _TAG, terms)
    return whole


# ---- NumPy's functions
