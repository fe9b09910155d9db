"""Measure one operation at one size, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np

import meshdist as dist
from meshdist.arrays.host import Array
from meshdist.backends.base import Choice
from meshdist.bench.operations import OPERATIONS, Operation, Setting, arrays, elements, is_in_place
from meshdist.bench.values import Values
from meshdist.collectives.registry import sent_bytes
from meshdist.groups.world import current_world

FEWEST, MOST = 5, 20_000
_GROWTH = 4
# Each with other values: a repeated call may take another code path.
_CHECKED_CALLS = 3
# Shorter calls are timed in batches of about this length: ranks leave a call at different times, and the time of the
# slowest rank in each call adds up to more than all calls take.
_BATCH_S = 100e-6
# More calls than any kind of call has trials, also on a busy machine, where some are repeated.
_MOST_TUNING_CALLS = 5000
_TUNING_CALLS_IN_A_ROW, _TUNING_BYTES_IN_A_ROW = 64, 64 << 20


class Effort(NamedTuple):
    """How much to measure."""

    iterations: int | None  # number of timed calls; as many as fit into `seconds` if None
    seconds: float
    warmup: int | None  # number of calls before those; a tenth if None
    checks: bool


class Row(NamedTuple):
    """One measurement."""

    collective: str
    num_bytes: int  # the size of the longer of input and output of a rank
    elements: int  # the same in elements
    iterations: int  # number of timed calls; short ones are timed in batches
    median_us: float  # of a call on the slowest rank, as the next three
    min_us: float
    p90_us: float
    p99_us: float
    algorithm_gbps: float  # size by median time, in 10^9 bytes a second
    bus_gbps: float  # the same for the bytes that the busiest rank must send
    wrong: int | None  # number of wrong elements on all ranks; None without a check
    in_place: bool = False  # input and output were one array


def measure(name: str, operation: Operation, num_bytes: int, setting: Setting, effort: Effort) -> Row:
    """Measure an operation at about this size; all ranks call it, and get the same row."""
    gives, takes, _ = elements(operation, num_bytes, setting)
    give, take = arrays(operation, num_bytes, setting)
    call = operation.prepare(setting, give, take)
    wrong = _wrong(operation, num_bytes, setting, call, (give, take)) if effort.checks else None
    # Zeros do not overflow in repeated sums.
    give.fill(0)
    take.fill(0)
    iterations, batch = effort.iterations, 1
    if iterations is None or iterations >= 2 * FEWEST:  # fewer are not timed in batches
        found, median_s = _iterations_for(call, effort.seconds)
        iterations = iterations or found
        batch = max(1, min(iterations // FEWEST, int(_BATCH_S / max(1e-9, median_s))))
        iterations -= iterations % batch
    warmup = max(1, iterations // 10) if effort.warmup is None else effort.warmup
    times = _on_slowest(_times(call, iterations // batch, warmup, batch)) / operation.trips
    count = max(gives, takes)
    size, median = count * setting.dtype.itemsize, float(np.median(times))
    sent = sent_bytes(operation.volume, size, setting.num_ranks)
    least, p90, p99 = float(times.min()), float(np.percentile(times, 90)), float(np.percentile(times, 99))
    micros = (1e6 * median, 1e6 * least, 1e6 * p90, 1e6 * p99)
    speeds = 1e-9 * size / median, 1e-9 * sent / median
    return Row(name, size, count, iterations, *micros, *speeds, wrong, is_in_place(operation, setting))


def tune(name: str, num_bytes: int, setting: Setting) -> list[Choice]:
    """Call one operation at one size until its way is chosen; return the choices that are new. All ranks call it."""
    backend = current_world().default_group.usable_backend("bench")
    before = {(choice.title, choice.most_bytes) for choice in backend.choices()}

    def new_choices() -> list[Choice]:
        return [choice for choice in backend.choices() if (choice.title, choice.most_bytes) not in before]

    give, take = arrays(OPERATIONS[name], num_bytes, setting)
    call = OPERATIONS[name].prepare(setting, give, take)
    give.fill(0)
    take.fill(0)
    call()
    # The trials of all ranks end at the same call. Where ranks share cores, what is done between calls is measured too.
    in_a_row = max(1, min(_TUNING_CALLS_IN_A_ROW, _TUNING_BYTES_IN_A_ROW // max(1, num_bytes)))
    for _ in range(0, _MOST_TUNING_CALLS, in_a_row):
        # If the distance of the processors changes meanwhile, the trials of either are enough.
        choices = new_choices()
        chosen = {(choice.kind, choice.most_bytes) for choice in choices if choice.chosen is not None}
        if all((choice.kind, choice.most_bytes) in chosen for choice in choices):
            break
        for _ in range(in_a_row):
            call()
    dist.barrier()
    return [choice for choice in new_choices() if choice.chosen is not None and len(choice.ways) > 1]


def _wrong(
    operation: Operation, num_bytes: int, setting: Setting, call: Callable[[], object], both: tuple[Array, Array]
) -> int:
    give, take = both
    values = Values(setting.dtype, setting.num_ranks, setting.op)
    block = elements(operation, num_bytes, setting)[2]
    wrong = 0
    for salt in range(_CHECKED_CALLS):
        take.fill(0)
        for begin in range(0, give.size, 1 << 20):
            end = min(give.size, begin + (1 << 20))
            give[begin:end] = values.of(setting.rank, begin, end, salt)
        call()
        if operation.has_output(setting):
            wrong += values.wrong(take, operation.due(setting, block), salt)
    total = np.array(wrong)
    dist.all_reduce(total)
    return int(total)


def _iterations_for(call: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Return how many calls fit into `seconds`, and the median time of a call."""
    calls = 1
    while True:
        times = _on_slowest(_times(call, calls, 0))
        spent_s, median_s = float(times.sum()), float(np.median(times))
        # The median ignores single calls that another process delays.
        if spent_s > seconds / 10 or calls >= MOST:
            return int(min(MOST, max(FEWEST, seconds / max(1e-9, median_s)))), median_s
        calls *= _GROWTH


def _times(call: Callable[[], object], batches: int, warmup: int, batch: int = 1) -> Array:
    """Return the time of a call in each of so many batches; a batch is `batch` calls, one after the other."""
    for _ in range(warmup):
        call()
    dist.barrier()
    stamps = [perf_counter()]
    stamp = stamps.append
    calls = range(batch)
    for _ in range(batches):
        for _ in calls:
            call()
        stamp(perf_counter())
    dist.barrier()
    return np.diff(stamps) / batch


def _on_slowest(times: Array) -> Array:
    dist.all_reduce(times, "max")
    return times
