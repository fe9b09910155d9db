"""Layout: which global rank sits where in a mesh. Pure arithmetic; no world and no input or output."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from meshdist.errors import UnknownAxisError
from meshdist.mesh.layout.axes_and_chunks import checked_names, unknown_axis
from meshdist.mesh.layout.rank_list import RankList, rank_array
from meshdist.mesh.layout.strides import Axis, digits, extent_of, fit, joined, offset, parted, row_major, way_along
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.mesh.layout.rank_list import Ranks


class Layout:
    """The global ranks of a mesh by axes. Immutable; equal if ranks, shape and names are equal.

    A layout derived from another one, such as a row, a plane or a flattened axis, has other axes over the same list of
    ranks. Deriving takes time independent of the number of ranks; arrays are made only on request.

    Args:
        ranks: Nested sequences or an integer array of unique, non-negative global ranks; copied.
        names: One unique name per axis, or None.
    """

    __slots__ = ("_array", "_axes", "_first", "_hash", "_list", "_names", "_shape")

    _array: Ranks | None
    _axes: tuple[Axis, ...]
    _first: int  # position in the list of the rank at coordinate (0, 0, ...)
    _hash: int | None
    _list: RankList
    _names: tuple[str, ...] | None
    _shape: tuple[int, ...]

    def __init__(self, ranks: Any, names: Sequence[str] | None = None) -> None:
        array = rank_array(ranks)
        checked = None if names is None else checked_names(names, array.shape)
        self._store(RankList(array.reshape(-1)), 0, row_major(array.shape), checked)
        self._array = array
        self._list.check()

    def _store(self, ranks: RankList, first: int, axes: tuple[Axis, ...], names: tuple[str, ...] | None) -> None:
        self._list = ranks
        self._first = first
        self._axes = axes
        self._shape = tuple(map(extent_of, axes))
        self._names = names
        self._array = None
        self._hash = None

    def _derived(self, first: int, axes: Iterable[Axis], names: Iterable[str] | None) -> Layout:
        layout = object.__new__(Layout)
        layout._store(self._list, first, tuple(axes), None if names is None else tuple(names))
        return layout

    @property
    def ranks(self) -> Ranks:
        """The global ranks by axes, a read-only array."""
        if self._array is None:
            everything = self._list.array
            step = everything.itemsize
            modes = [mode for axis in self._axes for mode in axis]
            extents, strides = [extent for extent, _ in modes], [stride * step for _, stride in modes]
            view: Ranks = np.ndarray(extents, everything.dtype, everything, self._first * step, strides)
            array = view.reshape(self._shape)  # a copy if an axis has several modes
            array.flags.writeable = False
            self._array = array
        return self._array

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes as strides in the list of ranks; see `meshdist.mesh.layout.strides`."""
        return self._axes

    @property
    def names(self) -> tuple[str, ...] | None:
        return self._names

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._axes)

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    def axis(self, axis: int | str) -> int:
        """Return the index of `axis`, a name or an index (negative indices count from the end)."""
        if isinstance(axis, str):
            if self._names is None or axis not in self._names:
                self._unknown(axis)
            return self._names.index(axis)
        if isinstance(axis, bool) or not hasattr(axis, "__index__"):
            raise TypeError(f"an axis is a name or an index, got {axis!r} ({type(axis).__name__})")
        index = operator.index(axis)
        if not -self.ndim <= index < self.ndim:
            self._unknown(index)
        return index % self.ndim

    def _unknown(self, axis: int | str) -> NoReturn:
        what = f"unknown axis {axis!r}: this mesh is {self.describe()}"
        if self._names is not None:
            raise unknown_axis(axis, self.describe(), self._names)
        raise UnknownAxisError(f"{what} and has no names; use an index below {self.ndim} or pass mesh_dim_names")

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the index of a global rank along each axis; None if the mesh does not contain it."""
        position = self._list.position(rank)
        return None if position is None else digits(position - self._first, self._axes)

    def row(self, axis: int, coordinate: Sequence[int]) -> Ranks:
        return self.select((axis,), coordinate).ranks

    def select(self, axes: Sequence[int], coordinate: Sequence[int]) -> Layout:
        first = self._first
        for number, index in enumerate(coordinate):
            if number not in axes:
                first += offset(self._axes[number], index)
        return self._derived(first, (self._axes[axis] for axis in axes), self._names_of(axes))

    def transpose(self, axes: Sequence[int]) -> Layout:
        return self._derived(self._first, (self._axes[axis] for axis in axes), self._names_of(axes))

    def flatten(self, axes: Sequence[int], name: str | None) -> Layout:
        """Return the layout with axes, in any order, joined at the place of the first one; the last varies fastest."""
        one = joined(self._axes[axis] for axis in axes)
        others = [axis for axis in range(self.ndim) if axis not in axes]
        place = sum(axis < axes[0] for axis in others)
        made = [self._axes[axis] for axis in others]
        made.insert(place, one)
        names = None
        if name is not None:
            if self._names is None and others:
                raise ValueError(f"flatten: a name for one axis of {self.describe()}, whose others have none: {name!r}")
            named = self._names_of(others) or []
            named.insert(place, name)
            names = checked_names(named, tuple(map(extent_of, made)))
        return self._derived(self._first, made, names)

    def unflatten(self, axis: int, extents: Sequence[int], names: Sequence[str] | None) -> Layout:
        """Return the layout with one axis split into several, at its place; the last one varies fastest.

        If the new axes do not follow the modes of `axis`, the ranks are copied to a new list; else the list is shared.

        `extents` and `names` are those of the new axes; `names` is None in a layout without names.
        """
        extent = self._shape[axis]
        if math.prod(extents) != extent:
            product = " x ".join(map(str, extents))
            raise ValueError(
                f"unflatten: axis {self.axis_text(axis)} has {counted(extent, 'rank')}, but {product} is"
                f" {math.prod(extents)}; pass sizes whose product is the size of the axis"
            )
        shape = (*self._shape[:axis], *extents, *self._shape[axis + 1 :])
        if self._names is None and names is not None:
            raise ValueError(
                f"unflatten: the axes of the mesh {self.describe()} have no names, so the new axes must have"
                f" none, got {tuple(names)}; leave names out, or create the mesh with mesh_dim_names"
            )
        if self._names is not None and (names is None or len(names) != len(extents)):
            given = "none" if names is None else f"{len(names)}: {names!r}"
            raise ValueError(
                f"unflatten: axis {self.axis_text(axis)} becomes {counted(len(extents), 'axis', 'axes')}, so pass"
                f" {counted(len(extents), 'name')}, got {given}"
            )
        if names is not None:
            old = self._names or ()
            names = checked_names((*old[:axis], *names, *old[axis + 1 :]), shape)
        parts = parted(self._axes[axis], extents)
        if parts is None:
            return Layout(self.ranks.reshape(shape), names)
        return self._derived(self._first, (*self._axes[:axis], *parts, *self._axes[axis + 1 :]), names)

    def split(self, axis: int, extents: Sequence[int]) -> list[Layout]:
        ends = np.cumsum(extents).tolist()
        return [self._part(axis, end - extent, extent) for end, extent in zip(ends, extents, strict=True)]

    def _part(self, axis: int, begin: int, extent: int) -> Layout:
        modes = self._axes[axis]
        if len(modes) > 1 and extent < self._shape[axis]:
            # The modes of a joined axis cannot express a part of it; the part needs its own list.
            places = tuple(
                slice(begin, begin + extent) if number == axis else slice(None) for number in range(self.ndim)
            )
            return Layout(self.ranks[places], self._names)
        stride = modes[0][1] if modes else 0
        part = modes if extent == self._shape[axis] else ((extent, stride),) if extent > 1 else ()
        axes = (*self._axes[:axis], part, *self._axes[axis + 1 :])
        return self._derived(self._first + begin * stride, axes, self._names)

    @staticmethod
    def concatenate(layouts: Sequence[Layout], axis: int) -> Layout:
        first = layouts[0]
        for other in layouts[1:]:
            rest = [shape[:axis] + shape[axis + 1 :] for shape in (first.shape, other.shape)]
            if first.names != other.names or first.ndim != other.ndim or rest[0] != rest[1]:
                raise ValueError(
                    f"concatenate: along axis {first.axis_text(axis)}, meshes must have the same axes, and all others"
                    f" of the same sizes; got {first.describe()} and {other.describe()}"
                )
        return Layout(np.concatenate([layout.ranks for layout in layouts], axis), first.names)

    def over(self, axes: Sequence[Axis], names: Sequence[str] | None, rank: int) -> Layout:
        """Return the layout of axes of derived layouts, over the same list of ranks, that contains a global rank."""
        if not fit(axes, self._axes):
            raise ValueError(f"axes that overlap, or that are not of the mesh {self.describe()}, make no mesh together")
        position = self._list.position(rank)
        if position is None or digits(position - self._first, self._axes) is None:
            raise ValueError(f"rank {rank} is not in the mesh {self.describe()}")
        along = way_along(axes, self._axes, position - self._first)
        shape = tuple(map(extent_of, axes))
        return self._derived(position - along, axes, None if names is None else checked_names(names, shape))

    def holds(self, axes: Sequence[Axis]) -> bool:
        """Return whether `axes` can be the axes of one mesh inside this layout."""
        return fit(axes, self._axes)

    def shares_list(self, other: Layout) -> bool:
        return self._list is other._list

    def members(self) -> tuple[int, ...]:
        return tuple(self.ranks.reshape(-1).tolist())

    def first_rank(self) -> int:
        return int(self._list.array[self._first])

    def describe(self) -> str:
        """Return the axes with their sizes, such as `(dp=2, tp=4)`, or `(2, 4)` without names."""
        if self._names is None:
            return f"({', '.join(map(str, self.shape))})"
        return f"({', '.join(f'{name}={extent}' for name, extent in zip(self._names, self.shape, strict=True))})"

    def axis_text(self, axis: int) -> str:
        """Return how messages name an axis: its quoted name, or its index."""
        return str(axis) if self._names is None else repr(self._names[axis])

    def _names_of(self, axes: Sequence[int]) -> list[str] | None:
        return None if self._names is None else [self._names[axis] for axis in axes]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        if self is other:
            return True
        if self._names != other._names or self._shape != other._shape:
            return False
        same = self._list is other._list and self._first == other._first and self._axes == other._axes
        return same or np.array_equal(self.ranks, other.ranks)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self._names, self.shape, self.ranks.tobytes()))
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.ranks, self._names)

    def __repr__(self) -> str:
        return f"Layout({self.describe()})"
