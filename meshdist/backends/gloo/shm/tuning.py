"""The trials of a group: which way to carry out a kind of call is the fastest here.

The first calls of a kind try the ways in turn, beginning with the default, each in a few calls, of which the very first
is left out: pages are mapped in it. After these, every rank writes into the table when it began and ended them; a step
later all know how long a call took, from the last rank's beginning to the last rank's end, and so all choose alike. A
single call between two comparisons would show less than its price: its end and the beginning of the next one follow
each other without a step (of all-to-alls of 1 MiB between 4 ranks on 2 cores, those through the slots looked as fast as
those that read, and took twice as long in a row).

The choice is remembered for the machine once two jobs have made it: see `meshdist.system.tuning_cache`. It does not
hold for ever: where the ranks' processors are, as the scheduler or the host of a virtual machine places them, decides
which way is faster as much as the size does, and changes while a job runs. So there are other trials while these have
no common cache (see cache_distance), and all trials begin again after many calls, and the longer the choice has been
right, the later. All ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from meshdist import core
from meshdist.backends.base import Choice
from meshdist.system.tuning_cache import TuningCache

# The least bytes of a call that is worth trials: shorter ones are fastest in one step everywhere.
TUNED_BYTES = 32 << 10
# The least bytes of a call that may be fastest in chunks.
LEAST_IN_CHUNKS = 256 << 10
# How many calls in a row are one measurement. Where ranks share cores, one may have carried out its part of several
# before another gets the core: there the time of all counts, and what the program does between them with it. Of calls
# that take less than a turn of the scheduler, more are needed: all-to-alls of 1 MiB that read, between 4 ranks on 2
# cores, took nearly twice as long in runs of three as in long ones, and those through the slots did not.
_CALLS_IN_A_RUN, _CALLS_ON_SHARED_CORES, _SHORT_CALLS_ON_SHARED_CORES = 2, 3, 8
_SHORT_CALL_BYTES = 2 << 20
# A way is dropped if it took this many times as long as the fastest, after one measurement, and after more: single
# calls are delayed by other processes. The default is measured three times, as it is right on most machines.
_HOPELESS, _TOO_SLOW = 3.0, 1.2
_LEAST_ROUNDS = 3
# How often a run in which another process had the core of a rank is repeated, for each way; where ranks share cores, a
# run at whose end other processes wait for one. If there are more of them, they count, and the choice is not
# remembered: it is that of a busy machine.
_REPEATS = 2
# After so many calls, the ways that were at most so many times as slow as the fastest are tried again, and the
# default in any case; if the choice stays, after twice as many the next time. Once before, the default is held
# against the others, and another choice against the default: all trials of short calls fit into a few milliseconds in
# which one processor had something else to do. Of choices that earlier jobs have made, the default needs that no
# more, and another one sooner: their arrays may have had other pages, or the caches more users (broadcasts of 4 MiB
# took three times as long in chunks, which had been chosen, as in the default way).
_LEAST_CALLS, _MOST_CALLS = 1000, 64_000
_CALLS_TO_CONFIRM, _CALLS_TO_CONFIRM_REMEMBERED = 100, 10
_SERIOUS = 2.0
# As many calls go the same way where ranks do not measure.
_FOR_EVER = 1 << 62


class Effort(NamedTuple):
    """How much is measured before a way is chosen, and how much faster another one has to be.

    Attributes:
        enough_ns, most_rounds: The ways that are left are measured until their runs have taken so long together: short
            calls are measured more often, as what delays a processor, its host above all, lasts longer than several of
            them.
        most_rounds_again: The same, of trials that begin again.
        worthwhile, worthwhile_on_shared_cores: How many times as fast as the default, or as what was chosen, another
            way must be to be chosen; where ranks share cores, their turns change from call to call.
    """

    enough_ns: int
    most_rounds: int
    most_rounds_again: int
    worthwhile: float
    worthwhile_on_shared_cores: float


# Of trials among the calls of a program; and of those that are all that a program does.
_PASSING, _THOROUGH = Effort(2_000_000, 10, _LEAST_ROUNDS, 1.05, 1.5), Effort(40_000_000, 40, 40, 1.05, 1.15)


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
        is_far: They are those of calls between processors without a common cache.
        chosen: The number of the chosen way; None until the first trials have ended.
        goes_on: Ways are being tried.
        calls: How many calls go the chosen way from now on; each choice has its own, of which nothing is left once it
            does not hold any more.
        was_disturbed: The way was chosen although another process had the core of a rank in measured calls.
    """

    def __init__(
        self,
        kind: str,
        most_bytes: int,
        ways: Sequence[str],
        *,
        measures: bool,
        has_cores: bool = True,
        is_far: bool = False,
        effort: Effort = _PASSING,
    ) -> None:
        self.kind, self.most_bytes, self.is_far = kind, most_bytes, is_far
        self.ways = ways
        self.chosen: int | None = None
        self._guess = 0  # what the others are held against until one is chosen
        self.goes_on = True
        self.shortest_ns: list[int | None] = [None] * len(ways)
        self._measures = measures
        self._effort = effort
        self._worthwhile = effort.worthwhile if has_cores else effort.worthwhile_on_shared_cores
        # The first call is not measured, since pages are mapped in it; it tells what is remembered.
        self._left = [0]
        self._tried = [*range(len(ways))]
        self._times: dict[int, int] = {}  # in nanoseconds, the shortest of these trials
        self._rounds = 0
        self._most_rounds = effort.most_rounds
        self._measured_ns = 0
        self._repeats = _REPEATS * len(ways)
        self._run = Run(0, [], 0)
        self._interval, self.calls = 0, core.Countdown(0)
        self._has_cores = has_cores
        on_shared_cores = _SHORT_CALLS_ON_SHARED_CORES if most_bytes <= _SHORT_CALL_BYTES else _CALLS_ON_SHARED_CORES
        self._calls_in_a_run = _CALLS_IN_A_RUN if has_cores else on_shared_cores
        self._is_new = False  # the next call is the first of its way, in which pages are mapped
        self.was_disturbed = self._is_disturbed = False

    @classmethod
    def of_one_way(cls, way: str) -> Trials:
        """Return what has nothing to choose."""
        trials = cls("", 0, (way,), measures=False)
        trials.settle(0)
        return trials

    @property
    def next(self) -> str:
        """The way of the next call."""
        return self.ways[self._left[0] if self.chosen is None or self.goes_on else self.chosen]

    @property
    def key(self) -> str:
        return self._key(is_far=self.is_far)

    @property
    def key_at_other_distance(self) -> str:
        return self._key(is_far=not self.is_far)

    def _key(self, *, is_far: bool) -> str:
        return f"{self.kind} {self.most_bytes}{' far' * is_far}"

    @property
    def is_final(self) -> bool:
        """Whether the way stays as it is: there is no other, or the ranks do not measure."""
        return self.chosen is not None and not self._measures

    @property
    def is_measured(self) -> bool:
        return self.chosen is not None and self.shortest_ns[self.chosen] is not None

    def choice(self) -> Choice:
        times = {way: 1e-9 * ns for way, ns in zip(self.ways, self.shortest_ns, strict=True) if ns is not None}
        return Choice(self.kind, self.most_bytes, tuple(self.ways), self.chosen, times, self._worthwhile, self.is_far)

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
        return self.is_first or num_calls + 1 == self._calls_in_a_run

    def abandon_run(self) -> None:
        """Begin the run again when calls go on."""
        self._run, self._is_new = Run(0, [], 0), not self.is_first

    def take_run(self) -> Run:
        run, self._run = self._run, Run(0, [], 0)
        return run

    def add(self, took_ns: int, remembered: int | None, *, was_disturbed: bool = False) -> None:
        """Take in a run: how long a call took, which way rank 0 remembers, and whether a rank lost its core."""
        if was_disturbed and not self.is_first:
            if self._repeats > 0:
                self._repeats -= 1
                return
            self._is_disturbed = True
        way = self._left.pop(0)
        if self.is_first:
            is_known = remembered is not None and remembered < len(self.ways)
            self._guess = 0 if remembered is None else remembered % len(self.ways)
            if is_known or not self._measures:
                self.settle(self._guess)
                return
        else:
            self._measured_ns += took_ns * self._calls_in_a_run
            self._times[way] = min(took_ns, self._times.get(way, took_ns))
        if not self._left:
            self._next_round()
        self._is_new = self._rounds == 1

    def settle(self, way: int) -> None:
        """The calls from now on go this way, many of them."""
        if way == self.chosen:
            self._interval = min(max(_LEAST_CALLS, 2 * self._interval), _MOST_CALLS)
        else:
            is_remembered, is_new = not self._times, self.chosen is None
            if way == 0 and (is_remembered or not is_new):
                self._interval = _LEAST_CALLS
            else:
                self._interval = _CALLS_TO_CONFIRM_REMEMBERED if is_remembered else _CALLS_TO_CONFIRM
        self.chosen, self.goes_on = way, False
        self._hold(self._interval if self._measures else _FOR_EVER)

    def passed(self) -> None:
        """Note a call that went the chosen way; after many, the trials begin again."""
        self.calls.left -= 1
        if self.calls.left == 0:
            self._begin_again()

    def retell(self) -> None:
        """Let nobody go on with what it was told about the calls from now on."""
        self._hold(self.calls.left)

    def _hold(self, num_calls: int) -> None:
        self.calls.left, self.calls = 0, core.Countdown(num_calls)

    def _begin_again(self) -> None:
        assert self.chosen is not None
        times = self.shortest_ns
        most = min((time for time in times if time is not None), default=0) * _SERIOUS
        others = [way for way, time in enumerate(times) if time is None or time <= most]
        if self._interval < _LEAST_CALLS and self.chosen:
            others = []  # the chosen way is held against the default alone
        self._left = list(dict.fromkeys((self.chosen, 0, *others)))
        self._tried, self._rounds, self._most_rounds = self._left.copy(), 1, self._effort.most_rounds_again
        self._times, self._measured_ns = {}, 0
        self._repeats = _REPEATS * len(self._tried)
        self._is_new, self._is_disturbed, self.goes_on = True, False, True

    def _next_round(self) -> None:
        times, incumbent = self._times, self._guess if self.chosen is None else self.chosen
        shortest = min(times.values(), default=0)
        most = shortest * (_HOPELESS if self._rounds == 1 else _TOO_SLOW)
        self._left = [way for way in self._tried if times.get(way, 0) <= most]
        if self._rounds >= _LEAST_ROUNDS:
            has_enough = self._rounds == self._most_rounds or self._measured_ns >= self._effort.enough_ns
            if has_enough or len(self._left) == 1:
                for way, time in times.items():
                    self.shortest_ns[way] = time
                self.was_disturbed = self._is_disturbed
                keeps = times[incumbent] <= shortest * self._worthwhile
                self.settle(incumbent if keeps else min(times, key=times.__getitem__))
                return
        elif incumbent not in self._left:
            self._left.insert(0, incumbent)
        self._rounds += 1


class Tuning:
    """The choices of a group.

    Args:
        mode: The least of what the ranks ask for.
        cache: The choices of earlier jobs; None if this is not rank 0, which tells the others.
        has_cores: There is a core for each rank of this host.

    Attributes:
        is_far: The ranks' processors have no common cache; the same on all ranks at the same call.
    """

    def __init__(self, mode: Mode, cache: TuningCache | None, *, has_cores: bool = False) -> None:
        self.mode = mode
        self.has_cores, self.is_far = has_cores, False
        self._cache = cache
        self._trials: dict[tuple[Any, ...], Trials] = {}

    def trials(self, kind: str, num_bytes: int, ways: Sequence[str]) -> Trials:
        """Return the trials of a kind of call of this size, now; the first of `ways`, by name, is the default."""
        most = 1 << max(0, num_bytes - 1).bit_length()
        key = self.is_far, kind, most, *ways
        known = self._trials.get(key)
        if known is None:
            has_one = most < TUNED_BYTES or len(ways) == 1
            measures = self.mode >= Mode.ON and not has_one
            effort = _THOROUGH if self.mode is Mode.FORCE else _PASSING
            known = self._trials[key] = Trials(
                kind, most, ways, measures=measures, has_cores=self.has_cores, is_far=self.is_far, effort=effort
            )
            if self.mode is Mode.OFF or has_one:
                known.settle(0)
        return known

    def moved(self, *, is_far: bool) -> None:
        """Note where the ranks' processors are."""
        if is_far != self.is_far:
            for trials in self._trials.values():
                trials.abandon_run()
                trials.retell()
        self.is_far = is_far

    def remembered(self, trials: Trials) -> int | None:
        """Return the way that is remembered; as a number behind those of all ways if only for the other distance.

        The trials are needed then as well, but that way is a better guess than the default.
        """
        if self._cache is None or self.mode is Mode.FORCE:
            return None
        for key, behind in ((trials.key, 0), (trials.key_at_other_distance, len(trials.ways))):
            way = self._cache.choice(key, or_candidate=self.mode is Mode.CACHED)
            if way in trials.ways:
                return trials.ways.index(way) + behind
        return None

    def choices(self) -> list[Choice]:
        return [trials.choice() for trials in self._trials.values()]

    def save(self) -> None:
        """Remember what was measured; on a busy machine, only if that is asked for."""
        measured = {
            trials.key: trials.ways[trials.chosen]
            for trials in self._trials.values()
            if trials.chosen is not None
            and trials.is_measured
            and (self.mode is Mode.FORCE or not trials.was_disturbed)
        }
        if self._cache is not None and measured:
            self._cache.update(measured, is_final=self.mode is Mode.FORCE)
