"""Whether the ranks' processors share a cache: on that depends which way of a call is the fastest, as on its size.

Each rank writes some cache lines before a step, and after it times how long those of a few others take to come. In the
next such step it tells what it has seen. So all ranks know the same; now and then they look again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshdist import core
from meshdist.backends.gloo.shm.shared_region import SharedRegion
from meshdist.backends.gloo.shm.single_copy import address_of

# From so many nanoseconds on, a cache line does not come out of a common cache. On an AMD EPYC it takes 15 to 50 within
# a group of cores, and 110 and more between two of them.
_FAR_NS = 90
# The ranks look again after calls of so many bytes, of which each counts as some more: about every 20 ms. A look takes
# 4 ranks on 2 cores some tenths of a millisecond: after every 32 calls, those of 64 KiB took three times as long.
# Then they look after each call until the looks of the one kind have outvoted the others: single ones fail where lines
# have left the caches, or the processor has done something else.
_BYTES, BYTES_OF_A_CALL, _VOTES = 128 << 20, 40 << 10, 4
# Of so many other ranks, the lines are timed.
_MOST_PEERS = 3


class CacheDistance:
    """The distance of the ranks of a group; without the core, it is not measured.

    Attributes:
        looks: The bytes of the calls until the ranks look again.
    """

    def __init__(self, region: SharedRegion, rank: int, num_ranks: int) -> None:
        self._is_far = self._sees_far = False
        self._votes, self.looks = -_VOTES, core.Countdown(_BYTES)
        peers = [(rank + step) % num_ranks for step in range(1, min(num_ranks, _MOST_PEERS + 1))]
        lines, byte, shape = region.timed_lines, np.dtype(np.uint8), (region.timed_lines.slot_bytes,)
        region.reserve_slots(lines, rank, lines.slot_bytes)
        self._mine, *self._others = [address_of(lines.slot(0, peer, byte, shape)) for peer in (rank, *peers)]

    def is_due(self, num_bytes: int) -> bool:
        """Count a call of so many bytes, equal on all ranks; return whether they are to look again after it."""
        self.looks.left -= num_bytes + BYTES_OF_A_CALL
        return self.looks.left <= 0

    def write(self) -> bool:
        """Write this rank's lines, before a step; return what it has seen the last time."""
        core.module.write_lines(self._mine)
        return self._sees_far

    def read(self, told: Iterable[bool]) -> bool:
        """After the step, time the lines of others, and take in what all have told.

        Return whether two ranks have no common cache; all return the same.
        """
        self._sees_far = any(core.module.time_lines(lines) > _FAR_NS for lines in self._others)
        self._votes = min(_VOTES, max(-_VOTES, self._votes + (1 if any(told) else -1)))
        is_clear = abs(self._votes) == _VOTES
        if is_clear:
            self._is_far = self._votes > 0
        self.looks.left = _BYTES if is_clear else 0
        return self._is_far
