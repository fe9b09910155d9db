"""The ranks that a mesh and all that is derived from it arrange: checked and sorted once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ranks = NDArray[np.int64]


class RankList:
    """Hold unique global ranks in some order, and find where each one is. Immutable.

    Args:
        ranks: A one-dimensional, contiguous int64 array that nobody writes to.

    Example:
        >>> ranks = RankList(np.array([4, 7, 5]))
        >>> ranks.position(5), ranks.position(6)
        (2, None)
    """

    __slots__ = ("_lookup", "array")

    def __init__(self, ranks: Ranks) -> None:
        self.array = ranks
        self._lookup: tuple[Ranks, Ranks] | None = None

    def check(self) -> None:
        """Raise ValueError if a rank is negative or there twice."""
        ordered, _ = self._by_rank()
        if ordered[0] < 0:
            raise ValueError(f"mesh: global ranks must not be negative, got {ordered[0]}")
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.size:
            count = int(np.count_nonzero(self.array == repeated[0]))
            raise ValueError(
                f"mesh: every rank may sit in a mesh once, but rank {repeated[0]} appears {count} times"
                f" among the {self.array.size} given"
            )

    def position(self, rank: int) -> int | None:
        """Return where the global rank `rank` is, None if it is not there."""
        ordered, position = self._by_rank()
        at = int(np.searchsorted(ordered, rank))
        if at == ordered.size or ordered[at] != rank:
            return None
        return int(position[at])

    def _by_rank(self) -> tuple[Ranks, Ranks]:
        """Return the ranks in ascending order and each one's position: sorted once, then searched."""
        if self._lookup is None:
            if (self.array[1:] > self.array[:-1]).all():  # as most are: nothing to sort
                self._lookup = self.array, np.arange(self.array.size)
            else:
                position = self.array.argsort(kind="stable")
                self._lookup = self.array[position], position
        return self._lookup


def rank_array(ranks: Any) -> Ranks:
    """Return `ranks`, nested sequences or an array, as a read-only int64 array of its own.

    Raises:
        ValueError: There are none, or rows of unequal length.
        TypeError: They are not integers.
    """
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
