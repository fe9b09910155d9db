"""The kinds of FlagBarrier: compiled, and in Python for processors that keep the order of stores and loads, or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshdist import core
from meshdist.backends.gloo.shm.flag_barrier import ALL, Awaited, FlagBarrier, LongWait, PeerSet
from meshdist.backends.gloo.shm.segment import KEEPS_ORDER, fence
from meshdist.backends.gloo.shm.shared_region import FINGERPRINT, NUM_PHASES, SIGNAL_PLACES, SharedRegion


class FencedFlagBarrier(FlagBarrier):
    """For processors that may reorder stores and loads: all but x86-64."""

    def signal(self, fingerprint: int, awaited: Awaited = ALL) -> int:
        # Before the signal, as all that this rank has written before.
        self._words[self._mine + SIGNAL_PLACES[(self.step + 1) % NUM_PHASES] + FINGERPRINT] = fingerprint
        fence()
        return super().signal(fingerprint, awaited)

    def _is_same_call(self, step: int, signals: Sequence[int]) -> bool:
        fence()
        return super()._is_same_call(step, signals)

    def await_others(self, word: int, plan: LongWait) -> None:
        super().await_others(word, plan)
        fence()

    def arrived(self, word: int) -> bool:
        arrived = super().arrived(word)
        fence()
        return arrived


if TYPE_CHECKING or core.module is not None:

    class CompiledFlagBarrier(core.Barrier, FlagBarrier):
        """The core signals and waits; it has acquire and release order on all processors."""

        def __init__(self, region: SharedRegion, rank: int, num_ranks: int, members: PeerSet) -> None:
            FlagBarrier.__init__(self, region, rank, num_ranks, members)
            self.attach(self._words, self._mine, self._signals, self._bells, region.call_words(rank))


def flag_barrier_class() -> type[FlagBarrier]:
    if core.module is not None:
        return CompiledFlagBarrier
    return FlagBarrier if KEEPS_ORDER else FencedFlagBarrier
