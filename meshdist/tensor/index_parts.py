"""Indexing by integers, slices and None: views of the blocks.

Of a cut dimension a slice leaves each rank its part, and an integer leaves a row on one rank: the result is a pending
sum to which the other ranks add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from meshdist.runtime.plan_cache import remember
from meshdist.tensor.agreement import Origin, merged, origin_of
from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_keys import FULL, Entry, dims_of
from meshdist.tensor.operands import require, resolved


class Part(NamedTuple):
    """What a key without arrays takes of an array, on one rank.

    Attributes:
        key: The key to index the block with.
        is_held: Whether this rank's block has all rows that integers take of cut dimensions.
        layout: The layout of the result.
        shape: The shape of this rank's block of the result.
        is_copied: Whether the result is a copy, since integers leave other ranks nothing to share with the array.
        origin: The result's, if integers leave other ranks nothing.
    """

    key: tuple[Entry, ...]
    is_held: bool
    layout: ArrayLayout
    shape: tuple[int, ...]
    is_copied: bool
    origin: Origin


# The layouts of results that are what the same key takes of the block, by layout and key; and other parts, by layout,
# key, coordinate in the mesh, and whether the array is boolean.
_views: dict[tuple[Any, ...], ArrayLayout] = {}
_parts: dict[tuple[Any, ...], Part] = {}


def view_layout(layout: ArrayLayout, known: Any) -> ArrayLayout | None:
    """Return the layout of what a remembered key takes, if it can index the blocks as it is."""
    return _views.get((layout, known))


def taken(x: DTensor, entries: list[Entry], known: Any = None) -> DTensor:
    """Return `x[entries]` for a key without arrays."""
    x, entries = _forward(x, entries)
    lost = lost_axes(x.layout, entries)
    x = with_pending(x, lost)
    return _of_block(x, part_of(x, entries, known))


def _of_block(x: DTensor, part: Part) -> DTensor:
    origin = part.origin if x._origin is None else merged(x._origin, part.origin)
    if not part.is_held:
        return wrap(nothing(part.shape, x), part.layout, x.mesh, origin)
    local = x.to_local()[part.key]
    return wrap(local.copy() if part.is_copied else local, part.layout, x.mesh, origin)


def taken_before(x: DTensor, known: Any) -> DTensor | None:
    """Return what a remembered key takes of `x`; None if it has not been asked of such an array."""
    part = _parts.get((x.layout, known, coordinate_in(x.mesh), x.dtype.kind == "b"))
    return None if part is None else _of_block(x, part)


def _forward(x: DTensor, entries: list[Entry]) -> tuple[DTensor, list[Entry]]:
    """Return the array where negative steps run along dimensions that are not cut."""
    reversed_dims = [dim for dim, rows in backward(x.layout, entries) if rows > 1]
    if not reversed_dims:
        return x, entries
    block, layout = uncut(
        "x[key]", x, reversed_dims, f"a negative step would move rows of dimension {reversed_dims[0]} between ranks"
    )
    return wrap(block, layout, x.mesh, x._origin), entries


def backward(layout: ArrayLayout, entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Return the cut dimensions that slices take with a negative step, and how many rows they take."""
    found = []
    dim = 0
    for entry in entries:
        if isinstance(entry, slice) and layout.cuts[dim] is not None and (entry.step or 1) < 0:
            found.append((dim, len(range(layout.shape[dim])[entry])))
        dim += dims_of(entry)
    return found


def uncut(name: str, x: DTensor, dims: Sequence[int], why: str, what: str = "x") -> tuple[Any, ArrayLayout]:
    """Return this rank's block of `x` with some dimensions not cut, and the layout: refused where they are."""
    cuts = x.layout.cuts
    found = [cut for dim, cut in enumerate(cuts) if cut is not None and dim in dims]
    if not found:
        return x.to_local(), x.layout
    target = x.layout.uncut(dims)
    if all(len(cut.sizes) == 1 for cut in found):
        return x.to_local(), target
    return require(name, x, target, why, what), target


def lost_axes(layout: ArrayLayout, entries: Sequence[Entry]) -> list[int]:
    """Return the axes along which integers leave one rank with what they take."""
    dims = []
    dim = 0
    for entry in entries:
        if isinstance(entry, int):
            dims.append(dim)
        dim += dims_of(entry)
    return open_axes(layout, dims)


def open_axes(layout: ArrayLayout, dims: Sequence[int]) -> list[int]:
    """Return the axes of several ranks that cut some of the dimensions."""
    return [axis for dim in dims for axis in layout.axes_of(dim) if layout.mesh_shape[axis] > 1]


def pending_op(x: DTensor) -> str:
    """Return the reduction of what one rank has and others add nothing to."""
    return "max" if x.dtype.kind == "b" else "sum"


def with_pending(x: DTensor, axes: Sequence[int]) -> DTensor:
    """Return `x` such that it can be a pending reduction along `axes` as well."""
    op = pending_op(x)
    kinds = (op,) if op == "max" else ("sum", "avg")
    if not axes or all(other in kinds for other in x.layout.pending.values()):
        return x
    return resolved(x)


def nothing(shape: tuple[int, ...], x: DTensor) -> Any:
    """Return a block that adds nothing to a pending reduction: -0.0, not 0.0, leaves every number what it is."""
    kind = x.dtype.kind
    value = complex(-0.0, -0.0) if kind == "c" else -0.0 if kind == "f" else 0
    return array_module(x.mesh).full(shape, value, x.dtype)


def part_of(x: DTensor, entries: Sequence[Entry], known: Any = None) -> Part:
    """Return what a key without arrays takes, on this rank; remembered by `known`, the key in hashable form."""
    coordinate = coordinate_in(x.mesh)
    remembered = (x.layout, known, coordinate, x.dtype.kind == "b")
    part = _parts.get(remembered) if known is not None else None
    if part is None:
        part = _part(x, entries, coordinate)
        if known is not None and Ellipsis in known:  # an element is an array then, and shares the memory
            part = part._replace(key=(*part.key, Ellipsis))
        if known is not None:
            cut = [dim for dim, cut in enumerate(x.layout.cuts) if cut is not None]
            places = [place for place, entry in enumerate(entries) if entry is not None]
            as_it_is = all(entries[places[dim]] == FULL for dim in cut)
            if as_it_is:
                remember(_views, (x.layout, known), part.layout)
            else:
                remember(_parts, remembered, part)
    return part


def _part(x: DTensor, entries: Sequence[Entry], coordinate: tuple[int, ...]) -> Part:
    layout = x.layout
    held = layout.index(coordinate)
    key: list[Entry] = []
    shape: list[int] = []
    cuts: list[Cut | None] = []
    is_held = True
    dim = 0
    for entry in entries:
        if entry is None:
            key.append(None)
            shape.append(1)
            cuts.append(None)
            continue
        rows, cut, own = layout.shape[dim], layout.cuts[dim], held[dim]
        dim += 1
        if isinstance(entry, slice):
            taken = range(rows)[entry]
            shape.append(len(taken))
            local, new = (entry, None) if cut is None else _slice_of_cut(taken, cut, own)
            key.append(local)
            cuts.append(new)
        elif cut is None:
            key.append(entry)
        else:
            is_held = is_held and own.start <= entry < own.stop
            key.append(entry - own.start)
    lost = lost_axes(layout, entries)
    pending = dict(layout.pending) | dict.fromkeys(lost, pending_op(x))
    taken_layout = ArrayLayout.of_cuts(shape, layout.mesh_shape, cuts, pending)
    origin = origin_of(layout) if lost else None
    return Part(tuple(key), is_held, taken_layout, taken_layout.local_shape(coordinate), bool(lost), origin)


def _slice_of_cut(taken: range, cut: Cut, own: slice) -> tuple[slice, Cut]:
    """Return what a slice takes of this rank's rows of a cut dimension, and how the result is cut."""
    taken = taken if taken.step > 0 else taken[::-1]  # one row at most

    def before(row: int) -> int:
        return min(max(0, -(-(row - taken.start) // taken.step)), len(taken))

    counts = [before(row) for row in accumulate(cut.sizes, initial=0)]
    sizes = tuple(after - first for first, after in pairwise(counts))
    mine = taken[before(own.start) : before(own.stop)]
    local = slice(mine.start - own.start, mine[-1] - own.start + 1, mine.step) if mine else slice(0, 0)
    return local, Cut(cut.axes, sizes)
