"""The trials of a group: which way to carry out a kind of call is the fastest here.

The first calls of a kind try the ways in turn, beginning with the default, each in a few calls, of which the very first
is left out: pages are mapped in it. After these, every rank writes into the table when it began and ended them; a step
later all know how long a call took, from the last rank's beginning to the last rank's end, and so all choose alike. A
single call between two comparisons would show less than its price: its end and the beginning of the next one follow
each other without a step (of all-to-alls of 1 MiB between 4 ranks on 2 cores, those through the slots looked as fast as
those that read, and took twice as long in a row).

The choice is kept for the group, and remembered for the machine once two jobs have made it: see
`meshdist.system.tuning_cache`. All ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from meshdist.backends.base import Choice
from meshdist.system.tuning_cache import TuningCache

# The least bytes of a call that is worth trials: shorter ones are fastest in one step everywhere.
TUNED_BYTES = 32 << 10
# The least bytes of a call that may be fastest in chunks.
LEAST_IN_CHUNKS = 256 << 10
# How many calls in a row are one measurement. Where ranks share cores, one may have carried out its part of several
# before another gets the core: there the time of all counts, and what the program does between them with it.
_CALLS_IN_A_RUN, _CALLS_ON_SHARED_CORES = 2, 3
# A way is dropped if it took this many times as long as the fastest, after one measurement, two, and so on: single
# calls are delayed by other processes. The default stays, which is right on most machines.
_HOPELESS = (3.0, 1.2)
_ROUNDS = 1 + len(_HOPELESS)
# How often a run in which another process had the core of a rank is repeated, for each way; where ranks share cores, a
# run at whose end other processes wait for one. If there are more of them, they count, and the choice is not
# remembered: it is that of a busy machine.
_REPEATS = 2
# Another way must be faster than the default by this factor to be chosen; where ranks share cores, whose turns change
# from call to call, by more.
_WORTHWHILE, _WORTHWHILE_ON_SHARED_CORES = 1.05, 1.25


class Mode(IntEnum):
    """What a rank asks for, by `MESHDIST_TUNING`; a group does the least of what its ranks ask for."""

    OFF = 0
    CACHED = 1
    ON = 2
    FORCE = 3


class Run(NamedTuple):
    """What a rank measured in calls in a row: when each, or all, began and ended; how often it lost its core."""

    num_calls: int
    times: list[int]
    num_preemptions: int


class Trials:
    """The trials of one kind of call; equal on all ranks at the same call.

    Attributes:
        kind, most_bytes, ways: As in `Choice`.
        chosen: The number of the chosen way; None while the trials go on.
        was_disturbed: Calls were measured in which another process had the core of a rank.
    """

    def __init__(
        self, kind: str, most_bytes: int, ways: Sequence[str], *, measures: bool, has_cores: bool = True
    ) -> None:
        self.kind, self.most_bytes = kind, most_bytes
        self.ways = ways
        self.chosen: int | None = None
        self.shortest_ns: list[int | None] = [None] * len(ways)
        self._measures = measures
        self._worthwhile = _WORTHWHILE if has_cores else _WORTHWHILE_ON_SHARED_CORES
        # The first call is not measured, since pages are mapped in it; it tells what is remembered.
        self._left = [0]
        self._rounds = 0
        self._repeats = _REPEATS * len(ways)
        self._run = Run(0, [], 0)
        self._has_cores = has_cores
        self._is_new = False  # the next call is the first of its way, in which pages are mapped
        self.was_disturbed = False

    @classmethod
    def of_one_way(cls, way: str) -> Trials:
        """Return what has nothing to choose."""
        trials = cls("", 0, (way,), measures=False)
        trials.chosen = 0
        return trials

    @property
    def next(self) -> str:
        """The way of the next call."""
        return self.ways[self._left[0] if self.chosen is None else self.chosen]

    @property
    def key(self) -> str:
        return f"{self.kind} {self.most_bytes}"

    @property
    def is_measured(self) -> bool:
        return self.chosen is not None and self._rounds == _ROUNDS

    def choice(self) -> Choice:
        times = {way: 1e-9 * ns for way, ns in zip(self.ways, self.shortest_ns, strict=True) if ns is not None}
        return Choice(self.kind, self.most_bytes, tuple(self.ways), self.chosen, times, self._worthwhile)

    @property
    def is_first(self) -> bool:
        return self._rounds == 0

    def ended(self, began: tuple[int, int], ended: tuple[int, int]) -> bool:
        """Note a call of this rank: the times, and how often it had lost its core; return whether the run is over."""
        if self._is_new:
            self._is_new = False
            return False
        num_calls, times, num_preemptions = self._run
        times = [times[0], ended[0]] if times and not self._has_cores else [*times, began[0], ended[0]]
        self._run = Run(num_calls + 1, times, num_preemptions + ended[1] - began[1])
        return self.is_first or num_calls + 1 == (_CALLS_IN_A_RUN if self._has_cores else _CALLS_ON_SHARED_CORES)

    def take_run(self) -> Run:
        run, self._run = self._run, Run(0, [], 0)
        return run

    def add(self, took_ns: int, remembered: int | None, *, was_disturbed: bool = False) -> None:
        """Take in a run: how long a call took, which way rank 0 remembers, and whether a rank lost its core."""
        if was_disturbed and not self.is_first:
            if self._repeats > 0:
                self._repeats -= 1
                return
            self.was_disturbed = True
        way = self._left.pop(0)
        if self.is_first:
            if remembered is not None or not self._measures:
                self.chosen = remembered or 0
                return
        else:
            known = self.shortest_ns[way]
            self.shortest_ns[way] = took_ns if known is None else min(known, took_ns)
        if not self._left:
            self._next_round()
        self._is_new = self._rounds == 1

    def _next_round(self) -> None:
        times = [time for time in self.shortest_ns if time is not None]
        if self._rounds == _ROUNDS:
            shortest, guess = min(times), self.shortest_ns[0]
            keeps = guess is not None and guess <= shortest * self._worthwhile
            self.chosen = 0 if keeps else self.shortest_ns.index(shortest)
            return
        most = min(times) * _HOPELESS[self._rounds - 1] if times else 0
        self._left = [way for way, time in enumerate(self.shortest_ns) if time is None or time <= most or way == 0]
        self._rounds += 1


class Tuning:
    """The choices of a group.

    Args:
        mode: The least of what the ranks ask for.
        cache: The choices of earlier jobs; None if this is not rank 0, which tells the others.
        has_cores: There is a core for each rank of this host.
    """

    def __init__(self, mode: Mode, cache: TuningCache | None, *, has_cores: bool = False) -> None:
        self.mode = mode
        self.has_cores = has_cores
        self._cache = cache
        self._trials: dict[tuple[Any, ...], Trials] = {}

    def trials(self, kind: str, num_bytes: int, ways: Sequence[str]) -> Trials:
        """Return the trials of a kind of call of this size; the first of `ways`, by name, is the default."""
        most = 1 << max(0, num_bytes - 1).bit_length()
        key = kind, most, *ways
        known = self._trials.get(key)
        if known is None:
            measures = self.mode >= Mode.ON
            known = self._trials[key] = Trials(kind, most, ways, measures=measures, has_cores=self.has_cores)
            if self.mode is Mode.OFF or most < TUNED_BYTES or len(ways) == 1:
                known.chosen = 0
        return known

    def remembered(self, trials: Trials) -> int | None:
        if self._cache is None or self.mode is Mode.FORCE:
            return None
        way = self._cache.choice(trials.key, or_candidate=self.mode is Mode.CACHED)
        return trials.ways.index(way) if way in trials.ways else None

    def choices(self) -> list[Choice]:
        return [trials.choice() for trials in self._trials.values()]

    def save(self) -> None:
        """Remember what was measured; on a busy machine, only if that is asked for."""
        measured = {
            trials.key: trials.next
            for trials in self._trials.values()
            if trials.is_measured and (self.mode is Mode.FORCE or not trials.was_disturbed)
        }
        if self._cache is not None and measured:
            self._cache.update(measured, is_final=self.mode is Mode.FORCE)
