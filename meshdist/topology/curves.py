"""Measured times of collectives over their sizes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Hold how long one collective took on one kind of group, at some sizes.

    Between the sizes, times are interpolated on logarithmic scales of both, which follows the knees that the caches put
    into them. Below the smallest, the smallest one's time stands; above the largest, time grows with the bytes.

    Args:
        collective: The name that the cost model has for it.
        members: How many members the group had on each of its hosts: (4,) for four ranks of one host.
        nbytes: The sizes, ascending, at least 1.
        seconds: The time at each.

    Raises:
        ValueError: No sizes, not as many times, sizes that do not ascend, or numbers that are not positive.

    Example:
        >>> curve = Curve("all_reduce", (2,), (1024, 4096), (1e-5, 2e-5))
        >>> [round(curve.at(nbytes) * 1e6, 1) for nbytes in (8, 1024, 2048, 4096, 40960)]
        [10.0, 10.0, 14.1, 20.0, 200.0]
    """

    collective: str
    members: tuple[int, ...]
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"curve of {self.collective} on {self.members}"
        if not self.nbytes or len(self.nbytes) != len(self.seconds):
            raise ValueError(f"{where}: {len(self.nbytes)} sizes and {len(self.seconds)} times; give one time per size")
        if not self.members or min(self.members) < 1:
            raise ValueError(f"{where}: a group has at least one member on each of its hosts")
        if sorted(set(self.nbytes)) != list(self.nbytes) or self.nbytes[0] < 1:
            raise ValueError(f"{where}: sizes must ascend from at least 1, got {list(self.nbytes)}")
        if not all(0 < time < math.inf for time in self.seconds):
            raise ValueError(f"{where}: times must be positive numbers of seconds, got {list(self.seconds)}")

    def at(self, nbytes: float) -> float:
        """Return the time at a size."""
        right = bisect_right(self.nbytes, nbytes)
        if right == 0:
            return self.seconds[0]
        if right == len(self.nbytes):
            return self.seconds[-1] * nbytes / self.nbytes[-1]
        low, high = self.nbytes[right - 1], self.nbytes[right]
        share = math.log(nbytes / low) / math.log(high / low)
        before, after = math.log(self.seconds[right - 1]), math.log(self.seconds[right])
        return math.exp(before + share * (after - before))


def nearest(curves: Sequence[Curve], collective: str, members: tuple[int, ...]) -> Curve | None:
    """Return the curve of `collective` on the group most like `members`: of as many hosts; None if there is none."""
    fitting = [curve for curve in curves if curve.collective == collective and len(curve.members) == len(members)]
    size = sum(members)
    return min(
        fitting, key=lambda curve: (curve.members != members, abs(math.log(sum(curve.members) / size))), default=None
    )
