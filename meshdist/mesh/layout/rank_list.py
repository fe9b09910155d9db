"""The list of ranks shared by a mesh and all meshes derived from it: checked and sorted once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ranks = NDArray[np.int64]


class RankList:
    """Unique global ranks in some order, with a lookup by rank; `ranks` is a 1-d int64 array that never changes."""

    __slots__ = ("_lookup", "array")

    def __init__(self, ranks: Ranks) -> None:
        self.array = ranks
        self._lookup: tuple[Ranks, Ranks] | None = None

    def check(self) -> None:
        """Raise ValueError if a rank is negative or repeated."""
        ordered, _ = self._by_rank()
        if ordered[0] < 0:
            raise ValueError(f"mesh: global ranks must not be negative, got {ordered[0]}")
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.size:
            count = int(np.count_nonzero(self.array == repeated[0]))
            raise ValueError(
                f"mesh: a rank can be in a mesh only once, but rank {repeated[0]} appears {count} times"
                f" among the {self.array.size} given"
            )

    def position(self, rank: int) -> int | None:
        """Return the position of a global rank; None if the list does not contain it."""
        ordered, position = self._by_rank()
        at = int(np.searchsorted(ordered, rank))
        if at == ordered.size or ordered[at] != rank:
            return None
        return int(position[at])

    def _by_rank(self) -> tuple[Ranks, Ranks]:
        if self._lookup is None:
            if (self.array[1:] > self.array[:-1]).all():  # already sorted, the common case
                self._lookup = self.array, np.arange(self.array.size)
            else:
                position = self.array.argsort(kind="stable")
                self._lookup = self.array[position], position
        return self._lookup


def rank_array(ranks: Any) -> Ranks:
    """Return a read-only int64 copy of `ranks`, nested sequences or an array."""
    try:
        given = np.asarray(ranks)
    except ValueError as error:
        raise ValueError(
            "mesh: rows of unequal length; every row along an axis needs the same number of ranks"
        ) from error
    if given.size == 0 or given.ndim == 0:
        raise ValueError(
            f"mesh: expected an array of ranks with at least one axis and one rank, got shape {given.shape}"
        )
    if given.dtype.kind not in "iu":
        raise TypeError(f"mesh: global ranks must be integers, got an array of {given.dtype}")
    array = np.array(given, dtype=np.int64, order="C")
    array.flags.writeable = False
    return array
