"""Pure rank arithmetic of a mesh: which global rank sits where. No world, no input or output."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from meshdist.mesh.axis_names import UnknownAxisError, checked_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ranks = NDArray[np.int64]


class Layout:
    """Hold the global ranks of a mesh by axes. Immutable; equal when ranks, shape and names are.

    Args:
        ranks: Nested sequences or an integer array of unique, non-negative global ranks; copied.
        names: One unique name per axis, or None.

    Raises:
        ValueError: No ranks, a negative or repeated one, rows of unequal length, or names that do not fit.
        TypeError: Ranks that are not integers, or names that are not strings.

    Example:
        >>> layout = Layout([[0, 1, 2], [3, 4, 5]], names=("dp", "tp"))
        >>> layout.coordinate(4)
        (1, 1)
        >>> layout.row(layout.axis("dp"), (1, 1)).tolist()
        [1, 4]
        >>> layout.select((1, 0), (1, 1)).ranks.tolist()
        [[0, 3], [1, 4], [2, 5]]
    """

    __slots__ = ("_hash", "_lookup", "_names", "_ranks")

    def __init__(self, ranks: Any, names: Sequence[str] | None = None) -> None:
        self._ranks = _rank_array(ranks)
        self._names = None if names is None else checked_names(names, self._ranks.shape)
        self._lookup: tuple[Ranks, Ranks] | None = None
        self._hash: int | None = None
        ordered, _ = self._by_rank()
        if ordered[0] < 0:
            raise ValueError(f"mesh: global ranks must not be negative, got {ordered[0]}")
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.size:
            count = int(np.count_nonzero(self._ranks == repeated[0]))
            raise ValueError(
                f"mesh: every rank may sit in a mesh once, but rank {repeated[0]} appears {count} times"
                f" among the {self.size} given"
            )

    @classmethod
    def _derived(cls, ranks: Ranks, names: tuple[str, ...] | None) -> Layout:
        """Wrap a view of a checked layout's ranks, which needs neither a copy nor checks."""
        layout = object.__new__(cls)
        layout._ranks = ranks
        layout._names = names
        layout._lookup = None
        layout._hash = None
        return layout

    @property
    def ranks(self) -> Ranks:
        """The global ranks by axes, a read-only array."""
        return self._ranks

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the axes, or None."""
        return self._names

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self._ranks.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._ranks.ndim

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    def axis(self, axis: int | str) -> int:
        """Return the index of `axis`, a name or an index (negative ones count from the end).

        Raises:
            UnknownAxisError: There is none; the message lists the axes. (A KeyError and a ValueError.)
            TypeError: `axis` is neither a string nor an integer.
        """
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
            raise UnknownAxisError(f"{what}, its axes are {', '.join(map(repr, self._names))}")
        raise UnknownAxisError(f"{what} and has no names; use an index below {self.ndim} or give mesh_dim_names")

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return where the global rank `rank` sits, one index per axis; None if it is not in the mesh."""
        ordered, position = self._by_rank()
        at = int(np.searchsorted(ordered, rank))
        if at == ordered.size or ordered[at] != rank:
            return None
        flat = int(position[at])
        coordinate = []
        for extent in reversed(self.shape):
            flat, index = divmod(flat, extent)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def _by_rank(self) -> tuple[Ranks, Ranks]:
        """Return the ranks in ascending order and each one's flat position: sorted once, then searched."""
        if self._lookup is None:
            flat = self._ranks.reshape(-1)
            position = flat.argsort(kind="stable")
            self._lookup = flat[position], position
        return self._lookup

    def row(self, axis: int, coordinate: Sequence[int]) -> Ranks:
        """Return the ranks along `axis` through `coordinate`: those that differ from it in this axis alone."""
        through: tuple[int | slice, ...] = (*coordinate[:axis], slice(None), *coordinate[axis + 1 :])
        return self._ranks[through]

    def select(self, axes: Sequence[int], coordinate: Sequence[int]) -> Layout:
        """Return the layout of `axes`, in this order, through `coordinate`, without copying ranks."""
        through = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
        plane = self._ranks[through]
        ascending = sorted(axes)
        names = None if self._names is None else tuple(self._names[axis] for axis in axes)
        return self._derived(plane.transpose([ascending.index(axis) for axis in axes]), names)

    def members(self) -> tuple[int, ...]:
        """Return all ranks in row-major order of the axes."""
        return tuple(self._ranks.reshape(-1).tolist())

    def describe(self) -> str:
        """Return the axes with their sizes, such as `(dp=2, tp=4)`, or `(2, 4)` without names."""
        if self._names is None:
            return f"({', '.join(map(str, self.shape))})"
        return f"({', '.join(f'{name}={extent}' for name, extent in zip(self._names, self.shape, strict=True))})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self._names == other._names and np.array_equal(self._ranks, other._ranks))

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self._names, self.shape, self._ranks.tobytes()))
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self._ranks, self._names)

    def __repr__(self) -> str:
        return f"Layout({self.describe()})"


def _rank_array(ranks: Any) -> Ranks:
    """Return `ranks` as a read-only int64 array of its own."""
    try:
        given = np.asarray(ranks)
    except ValueError as error:
        raise ValueError("mesh: rows of unequal length; every row along an axis needs as many ranks") from error
    if given.size == 0 or given.ndim == 0:
        raise ValueError(
            f"mesh: expected an array of ranks with at least one axis and one rank, got shape {given.shape}"
        )
    if given.dtype.kind not in "iu":
        raise TypeError(f"mesh: global ranks must be integers, got an array of {given.dtype}")
    array = np.array(given, dtype=np.int64, order="C")
    array.flags.writeable = False
    return array
