"""Curve: measured times of a collective over its sizes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from meshdist.system.plurals import counted


@dataclass(frozen=True)
class Curve:
    """Measured times of one collective on one kind of group at some sizes.

    Between sizes, times are interpolated on logarithmic scales, which follows the knees at cache sizes. Below the
    smallest size its time holds; above the largest, time grows linearly with the bytes.

    Args:
        collective: The cost model's name of the collective.
        members: The number of members on each host of the group: (4,) for four ranks of one host.
        nbytes: The sizes, ascending, at least 1.
        seconds: The time at each size.

    Raises:
        ValueError: There are no sizes, the number of times differs, the sizes do not ascend, or a number is not
            positive.

    Example:
        >>> from meshdist.topology import Curve
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
            raise ValueError(
                f"{where}: {counted(len(self.nbytes), 'size')} and {counted(len(self.seconds), 'time')};"
                " pass one time per size"
            )
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
    """Return the curve of `collective` for the most similar group on as many hosts; None if there is none."""
    fitting = [curve for curve in curves if curve.collective == collective and len(curve.members) == len(members)]
    size = sum(members)
    return min(
        fitting, key=lambda curve: (curve.members != members, abs(math.log(sum(curve.members) / size))), default=None
    )


def monotone(times: Sequence[float]) -> list[float]:
    """Return the nondecreasing times nearest to `times` in ratio (isotonic regression).

    By pooling adjacent violators: falling neighbours get their geometric mean, together with all values pooled before
        (Barlow, Bartholomew, Bremner and Brunk, "Statistical inference under order restrictions", 1972).
    """
    pools: list[tuple[float, int]] = []  # sum of logarithms, count
    for time in times:
        total, count = math.log(time), 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    # A single value stays unchanged to the last bit.
    found: list[float] = []
    for total, count in pools:
        found += [times[len(found)]] if count == 1 else [math.exp(total / count)] * count
    return found
