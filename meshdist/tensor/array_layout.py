"""ArrayLayout: which rank of a mesh holds which part of an array. Pure arithmetic; no mesh, no array, no messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from meshdist.mesh.layout.axes_and_chunks import chunk_sizes
from meshdist.runtime.plan_cache import remember
from meshdist.system.plurals import counted
from meshdist.tensor.placements import (
    REPLICATE,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    placements_text,
)


class Cut(NamedTuple):
    """How one dimension is cut.

    Attributes:
        axes: The mesh axes that cut it, ascending: the first cuts outermost.
        sizes: The rows of every block, by the ranks' coordinates along `axes` in row-major order.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    def coarser(self, axes: int, mesh_shape: Sequence[int]) -> Cut | None:
        """Return what the first `axes` of the axes cut: the blocks before the inner axes cut them; None for none."""
        if axes == 0:
            return None
        inner = math.prod(mesh_shape[axis] for axis in self.axes[axes:])
        sums = (sum(self.sizes[at : at + inner]) for at in range(0, len(self.sizes), inner))
        return Cut(self.axes[:axes], tuple(sums))

    def is_within(self, other: Cut, mesh_shape: Sequence[int]) -> bool:
        """Return whether `other` cuts the blocks of this cut further, or is the same."""
        return self.axes == other.axes[: len(self.axes)] and self == other.coarser(len(self.axes), mesh_shape)


def number_in(axes: Sequence[int], coordinate: Sequence[Any], mesh_shape: Sequence[int]) -> Any:
    """Return the number of a rank among those that differ along `axes` only, in row-major order.

    If the coordinate consists of arrays, for many ranks, the result is an array too.
    """
    number = 0
    for axis in axes:
        number = number * mesh_shape[axis] + coordinate[axis]
    return number


class ArrayLayout:
    """An array's shape, the shape of its mesh, and the placements.

    There is one object for each layout: equal layouts are identical, so that plans are found by identity.

    Attributes:
        shape: The shape of the whole array.
        mesh_shape: The number of ranks along each axis.
        placements: One for each axis, in canonical form: dims not negative, no sizes where they are those of chunks.
        cuts: For each dimension its cut; None where none.
        pending: The axes along which the array is a pending reduction, and the reduction's name.
    """

    __slots__ = ("__weakref__", "_starts", "cuts", "is_replicated", "mesh_shape", "pending", "placements", "shape")

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    cuts: tuple[Cut | None, ...]
    pending: dict[int, str]
    is_replicated: bool  # every rank holds the whole array
    _starts: tuple[tuple[int, ...] | None, ...]  # for each cut dimension the first row of every block

    @staticmethod
    def of(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> ArrayLayout:
        """Return the layout of these placements, one per axis.

        Raises:
            PlacementError: A dimension that the array does not have, or sizes that are not the dimension's.
        """
        key = (tuple(shape), tuple(mesh_shape), tuple(placements))
        known = _BY_PLACEMENTS.get(key)
        if known is None:
            cuts = _cuts_of(*key)
            pending = {
                axis: placement.op for axis, placement in enumerate(placements) if isinstance(placement, Partial)
            }
            known = ArrayLayout.of_cuts(shape, mesh_shape, cuts, pending)
            remember(_BY_PLACEMENTS, key, known)
        return known

    @staticmethod
    def of_cuts(
        shape: Sequence[int],
        mesh_shape: Sequence[int],
        cuts: Sequence[Cut | None],
        pending: Mapping[int, str],
    ) -> ArrayLayout:
        """Return the layout with these cuts, one or None per dimension, and pending reductions by axis.

        Raises:
            PlacementError: Pending reductions of two kinds, whose order would matter.
        """
        shape, mesh_shape, cuts = tuple(shape), tuple(mesh_shape), tuple(cuts)
        pending = dict(sorted(pending.items()))
        if len({"sum" if op == "avg" else op for op in pending.values()}) > 1:
            found = " and ".join(sorted({repr(Partial(op)) for op in pending.values()}))
            raise PlacementError(f"placements: an array cannot be {found} at once: the order of the two would matter")
        key = (shape, mesh_shape, cuts, tuple(pending.items()))
        layout = _LAYOUTS.get(key)
        if layout is None:
            layout = object.__new__(ArrayLayout)
            layout.shape = shape
            layout.mesh_shape = mesh_shape
            layout.cuts = cuts
            layout.pending = pending
            layout.placements = _placements_of(shape, mesh_shape, cuts, pending)
            layout.is_replicated = not pending and all(cut is None for cut in cuts)
            layout._starts = tuple(None if cut is None else tuple(accumulate(cut.sizes, initial=0)) for cut in cuts)
            with _lock:  # setdefault of a WeakValueDictionary is not atomic
                layout = _LAYOUTS.setdefault(key, layout)
        return layout

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayLayout.of, (self.shape, self.mesh_shape, self.placements)

    def __repr__(self) -> str:
        return f"ArrayLayout({self.shape}, mesh {self.mesh_shape}, {placements_text(self.placements, None)})"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def index(self, coordinate: Sequence[int]) -> tuple[slice, ...]:
        """Return the part of the whole array that the rank at `coordinate` holds, as a slice for each dimension."""
        slices = []
        for rows, cut, starts in zip(self.shape, self.cuts, self._starts, strict=True):
            if cut is None or starts is None:
                slices.append(slice(0, rows))
            else:
                block = number_in(cut.axes, coordinate, self.mesh_shape)
                slices.append(slice(starts[block], starts[block + 1]))
        return tuple(slices)

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the block of the rank at `coordinate`."""
        return tuple(
            rows if cut is None else cut.sizes[number_in(cut.axes, coordinate, self.mesh_shape)]
            for rows, cut in zip(self.shape, self.cuts, strict=True)
        )

    def starts(self, dim: int) -> tuple[int, ...]:
        """Return the first row of every block of a dimension that is cut, and the number of its rows at the end."""
        starts = self._starts[dim]
        assert starts is not None, f"dimension {dim} is not cut"
        return starts

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Return the coordinates of all ranks, in row-major order."""
        return product(*map(range, self.mesh_shape))

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that cut dimension `dim`."""
        cut = self.cuts[dim]
        return () if cut is None else cut.axes

    def with_cuts(self, cuts: Sequence[Cut | None]) -> ArrayLayout:
        """Return the layout with other cuts, and the same pending reductions."""
        return ArrayLayout.of_cuts(self.shape, self.mesh_shape, cuts, self.pending)

    def uncut(self, dims: Collection[int]) -> ArrayLayout:
        """Return the layout in which no axis cuts the dimensions `dims`."""
        return self.with_cuts([None if dim in dims else cut for dim, cut in enumerate(self.cuts)])

    def resolved(self, axes: Iterable[int] | None = None) -> ArrayLayout:
        """Return the layout without the pending reductions along `axes`; None: along any."""
        left = {} if axes is None else {axis: op for axis, op in self.pending.items() if axis not in set(axes)}
        return ArrayLayout.of_cuts(self.shape, self.mesh_shape, self.cuts, left)

    def describe(self, names: Sequence[str] | None) -> str:
        """Return the layout in words: `(8, 4) as {'dp': Shard(0), 'tp': Replicate()}`."""
        return f"{self.shape} as {placements_text(self.placements, names)}"


_lock = threading.Lock()
_LAYOUTS: WeakValueDictionary[tuple[Any, ...], ArrayLayout] = WeakValueDictionary()
_BY_PLACEMENTS: dict[tuple[Any, ...], ArrayLayout] = {}


def _cuts_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[Cut | None]:
    if len(mesh_shape) != len(placements):
        raise PlacementError(f"placements: expected {len(mesh_shape)}, one per axis of the mesh, got {len(placements)}")
    cuts: list[Cut | None] = [None] * len(shape)
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            continue
        if not -len(shape) <= placement.dim < len(shape):
            raise PlacementError(
                f"placements: {placement} shards dimension {placement.dim}, but the array, of shape {shape}, has only"
                f" {counted(len(shape), 'dimension')}"
            )
        dim = placement.dim % len(shape)
        outer = cuts[dim] or Cut((), (shape[dim],))
        sizes = _blocks(placement, outer.sizes, mesh_shape[axis], shape)
        cuts[dim] = Cut((*outer.axes, axis), sizes)
    return cuts


def _blocks(placement: Shard, outer: tuple[int, ...], parts: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the blocks into which an axis of `parts` ranks cuts blocks of the sizes `outer`."""
    if placement.sizes is None:
        return tuple(size for rows in outer for size in chunk_sizes(rows, parts))
    nested = placement.sizes if placement.sizes and isinstance(placement.sizes[0], tuple) else (placement.sizes,)
    lists = nested * len(outer) if len(nested) == 1 else nested
    if len(lists) != len(outer) or any(len(sizes) != parts for sizes in lists):
        for_each = f", for each of {len(outer)} blocks," if len(outer) > 1 else ""
        raise PlacementError(f"placements: {placement} must have{for_each} {counted(parts, 'size')}, one for each rank")
    for rows, sizes in zip(outer, lists, strict=True):
        if sum(sizes) != rows:
            raise PlacementError(
                f"placements: {placement} has sizes of {' + '.join(map(str, sizes))} = {sum(sizes)} rows, for {rows}"
                f" rows of dimension {placement.dim} of an array of shape {shape}"
            )
    return tuple(size for sizes in lists for size in sizes)


def _placements_of(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    cuts: tuple[Cut | None, ...],
    pending: dict[int, str],
) -> tuple[Placement, ...]:
    placements: list[Placement] = [REPLICATE] * len(mesh_shape)
    for axis, op in pending.items():
        placements[axis] = Partial(op)
    for dim, cut in enumerate(cuts):
        outer: tuple[int, ...] = (shape[dim],)
        for depth, axis in enumerate(() if cut is None else cut.axes, 1):
            assert isinstance(placements[axis], Replicate), f"axis {axis} has two placements"
            assert cut is not None
            inner = cut.coarser(depth, mesh_shape)
            assert inner is not None
            placements[axis] = _shard_of(dim, outer, inner.sizes, mesh_shape[axis])
            outer = inner.sizes
    return tuple(placements)


def _shard_of(dim: int, outer: tuple[int, ...], sizes: tuple[int, ...], parts: int) -> Shard:
    lists = tuple(sizes[at : at + parts] for at in range(0, len(sizes), parts))
    if all(sizes == chunk_sizes(rows, parts) for rows, sizes in zip(outer, lists, strict=True)):
        return Shard(dim)
    return Shard(dim, lists[0] if len(set(lists)) == 1 else lists)


def is_cut(layout: ArrayLayout, dim: int) -> bool:
    """Return whether dimension `dim` lies on several ranks."""
    cut = layout.cuts[dim]
    return cut is not None and len(cut.sizes) > 1


def is_whole(layout: ArrayLayout, axis: Any) -> bool:
    """Return whether the dimensions that `axis=` of a call names, None for all, each lie on one rank."""
    dims = (
        range(layout.ndim) if axis is None or not layout.ndim else axis if isinstance(axis, (tuple, list)) else (axis,)
    )
    return not any(is_cut(layout, dim) for dim in dims)


@lru_cache(maxsize=10_000)
def pencil(layout: ArrayLayout, dim: int, busy: Collection[int] = ()) -> ArrayLayout | None:
    """Return the layout in which the axes that cut `dim` cut another dimension instead; None if there is none.

    The other dimension is one that is not cut and not in `busy`, if there is one; and the largest such.
    """
    others = [other for other in range(layout.ndim) if other != dim]
    if not others:
        return None
    to = min(others, key=lambda other: (is_cut(layout, other), other in busy, -layout.shape[other]))
    moving = layout.axes_of(dim)
    # What cut `to` further in has to cut the blocks of the axes that come in before it.
    inner = {axis for axis in layout.axes_of(to) if axis > min(moving)}
    placements = [
        Shard(to) if axis in moving or axis in inner else placement for axis, placement in enumerate(layout.placements)
    ]
    return ArrayLayout.of(layout.shape, layout.mesh_shape, placements)
