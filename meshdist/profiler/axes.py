"""Which axes of a mesh a group lies along."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ranks = NDArray[np.int64]


class Axes:
    """The axes of a mesh, to find the groups of one rank by.

    Args:
        ranks: The global ranks of the mesh, by axes.
        names: The names of the axes, or None.
        rank: The global rank whose groups are asked for.

    Example:
        >>> axes = Axes(np.arange(8).reshape(2, 2, 2), ("dp", "cp", "tp"), rank=0)
        >>> axes.of((0, 1)), axes.of((0, 1, 4, 5)), axes.of((0, 7))
        ('tp', 'dp,tp', None)
    """

    def __init__(self, ranks: Ranks, names: tuple[str, ...] | None, rank: int) -> None:
        self._ranks = ranks
        self._names = names
        self._rank = rank

    def of(self, ranks: tuple[int, ...]) -> str | None:
        """Return the axes that the group of these global ranks runs along, as `dp` or `dp,tp`; None where none.

        The group holds the calling rank and all ranks of the mesh that differ from it in these axes alone, in any
        order. It is that of an axis, of a slice, of the flattened mesh, or one that was made by itself. A group of this
        rank alone is along all axes that have no other rank.
        """
        inside = np.isin(self._ranks, ranks)
        if self._rank not in ranks or np.count_nonzero(inside) != len(ranks):
            return None
        places = np.nonzero(inside)
        along = [axis for axis, at in enumerate(places) if at.min() != at.max()]
        shape = self._ranks.shape
        if len(ranks) != np.prod([shape[axis] for axis in along], dtype=np.int64):
            return None
        along = along or [axis for axis, size in enumerate(shape) if size == 1]
        if not along:
            return None
        return f"axis {','.join(map(str, along))}" if self._names is None else ",".join(self._names[k] for k in along)
