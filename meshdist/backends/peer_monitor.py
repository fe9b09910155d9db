"""PeerMonitor: paces how often a wait checks its peers, and how many of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

# Interval of checks in one wait. A check of one rank takes two requests to the store, 130 us of processor time on both
# sides of a 2-core machine: 1,000 ranks that each check one peer five times a second use a third of the store's core.
LOOK_S = 0.2
# Ranks per check: 2 ms.
_MOST_ASKED = 16


class PeerMonitor:
    """Paces the checks of one wait, so that a peer's end is noticed within a second without flooding the store."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._turn = 0

    def is_due(self) -> bool:
        """Return True if a check is due."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + LOOK_S
        return True

    def turn(self, ranks: Sequence[int], most: int = _MOST_ASKED) -> list[int]:
        """Return the ranks to check now: all if they are few, else the next ones in turn."""
        if not ranks:
            return []
        first, count = self._turn % len(ranks), min(most, len(ranks))
        self._turn = first + count
        return [ranks[(first + step) % len(ranks)] for step in range(count)]
