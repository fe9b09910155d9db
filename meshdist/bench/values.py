"""The input values of the ranks, from which every rank computes its expected output.

Values are small whole numbers that are exact in the dtype, also summed over all ranks, so that rounding hides no
mistake; none is zero, so that a missing rank shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import ReduceOp

# Elements compared at a time: checking a GiB must not need several.
_PIECE = 1 << 20


class Part(NamedTuple):
    """A part of an output: the reduction of the inputs of some ranks."""

    begin: int  # where the part begins in the output
    ranks: tuple[int, ...]  # the ranks of the inputs; one without a reduction
    source: int  # where the part begins in the inputs
    length: int  # in elements


class Values:
    """The input values of the ranks."""

    def __init__(self, dtype: np.dtype[np.generic], num_ranks: int, op: ReduceOp) -> None:
        self.dtype = dtype
        self._num_ranks = num_ranks
        self._op = op
        # A prime, so that blocks differ; fewer if larger sums would not be exact.
        self._kinds = max(1, min(61, _largest_exact(dtype) // max(1, num_ranks)))

    def of(self, rank: int, begin: int, end: int, salt: int) -> Array:
        """Return elements `begin` to `end` of a rank's input; each `salt` gives other values."""
        numbers = (np.arange(begin, end) + 7 * rank + 11 * salt) % self._kinds + 1
        return numbers.astype(self.dtype)

    def wrong(self, taken: Array, parts: list[Part], salt: int) -> int:
        """Return the number of wrong elements in an output."""
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
    # The largest exact whole number. Integers wrap, and are always exact; a bool is 0 or 1.
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
