"""What the ranks give, so that every rank knows by itself what it must take.

Values are small whole numbers that are exact in the dtype, also summed over all ranks, so that no rounding hides a
mistake; no zeros, so that a rank that is left out shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshdist.arrays import Array
from meshdist.reduce_op import ReduceOp

# What is compared at a time, so that to check a GiB does not take several.
_PIECE = 1 << 20


class Part(NamedTuple):
    """A part of what a rank takes: the reduction of what some ranks give.

    Attributes:
        begin: Where the part begins in what is taken.
        ranks: Whose elements it is made of, one rank where nothing is reduced.
        source: Where the part begins in what they give.
        length: Elements.
    """

    begin: int
    ranks: tuple[int, ...]
    source: int
    length: int


class Values:
    """The elements that the ranks give.

    Args:
        dtype: Of the elements.
        num_ranks: How many ranks there are.
        op: The reduction.

    Example:
        >>> values = Values(np.dtype(np.int8), 2, ReduceOp.SUM)
        >>> values.of(1, 0, 3, salt=0).tolist()
        [8, 9, 10]
        >>> values.wrong(np.array([9, 11, 0], np.int8), [Part(0, (0, 1), 0, 3)], salt=0)
        1
    """

    def __init__(self, dtype: np.dtype[np.generic], num_ranks: int, op: ReduceOp) -> None:
        self.dtype = dtype
        self._num_ranks = num_ranks
        self._op = op
        # A prime, so that no two blocks look alike; less where the sums of larger ones would not be exact.
        self._kinds = max(1, min(61, _largest_exact(dtype) // max(1, num_ranks)))

    def of(self, rank: int, begin: int, end: int, salt: int) -> Array:
        """Return elements `begin` to `end` of what a rank gives; other ones for each `salt`."""
        numbers = (np.arange(begin, end) + 7 * rank + 11 * salt) % self._kinds + 1
        return numbers.astype(self.dtype)

    def wrong(self, taken: Array, parts: list[Part], salt: int) -> int:
        """Return how many elements of what was taken are not what they must be."""
        return sum(
            int(np.count_nonzero(taken[begin:end] != due))
            for part in parts
            for begin, end, due in self._due(part, salt)
        )

    def _due(self, part: Part, salt: int) -> Iterator[tuple[int, int, Array]]:
        for begin in range(0, part.length, _PIECE):
            end = min(part.length, begin + _PIECE)
            first, *rest = part.ranks
            due = self.of(first, part.source + begin, part.source + end, salt)
            for rank in rest:
                self._op.ufunc(due, self.of(rank, part.source + begin, part.source + end, salt), out=due)
            if rest:
                self._op.finish(due, self._num_ranks)
            yield part.begin + begin, part.begin + end, due


def _largest_exact(dtype: np.dtype[np.generic]) -> int:
    # Up to where all whole numbers are exact. Integers wrap, and are exact whatever they are; a bool is one or zero.
    if dtype.kind == "b":
        return 1
    if dtype.kind in "iu":
        return 1 << 30
    number = 1
    while number < 1 << 20 and _is_exact(2 * number - 1, dtype):
        number *= 2
    return number


def _is_exact(number: int, dtype: np.dtype[np.generic]) -> bool:
    with np.errstate(over="ignore"):
        rounded = np.array(number, np.float32).astype(dtype)
    return complex(rounded.astype(np.complex64)) == number
