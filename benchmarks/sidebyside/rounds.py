"""The measurement: rounds in which the libraries take turns.

The speed of a shared machine drifts, so times of different minutes cannot be compared. In a round every library does
the same work within a fraction of a second, and only ratios within a round count; the median over rounds is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from sidebyside.cases import Case
from sidebyside.jobs import Job

FEWEST, MOST = 3, 1_000_000
_GROWTH = 4
# How fast arrays of this size or more are depends on which pages they get: in each round they get others.
_MANY_PAGES_BYTES = 1 << 20


def iterations_for(job: Job, seconds: float) -> int:
    """Return how many calls of the prepared case take about `seconds`."""
    iterations, call_s = 1, job.time(1)
    # By the fastest so far: one call that is held up by another process says nothing about the next.
    while call_s * iterations < seconds / 4 and iterations < MOST:
        iterations *= _GROWTH
        call_s = min(call_s, job.time(iterations))
    return _fitting(seconds, call_s)


def measure(jobs: Sequence[Job], case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure one case with all jobs in turn, each for about `seconds` a round.

    Returns:
        The case, and under "times" for each library the seconds of a call in every round.
    """
    iterations = {}
    for job in jobs:
        job.prepare(case)
        iterations[job.library.name] = iterations_for(job, seconds)
    times: dict[str, list[float]] = {job.library.name: [] for job in jobs}
    for number in range(rounds):
        if number and case.nbytes >= _MANY_PAGES_BYTES:
            for job in jobs:
                job.prepare(case)
        turn = number % len(jobs)  # nobody is always the first, or always behind the same library
        for job in (*jobs[turn:], *jobs[:turn]):
            name = job.library.name
            times[name].append(job.time(iterations[name]))
            # A busy machine can make calls a hundred times as long; then the next round is made shorter, step by step.
            fewest, most = iterations[name] // _GROWTH, iterations[name] * _GROWTH
            iterations[name] = min(max(_fitting(seconds, times[name][-1]), fewest), most)
    return {**case._asdict(), "ranks": jobs[0].ranks, "times": times}


def _fitting(seconds: float, call_s: float) -> int:
    return min(MOST, max(FEWEST, round(seconds / max(call_s, 1e-9))))


def ratio(times: dict[str, list[float]], others: Sequence[str], own: str = "meshdist") -> float:
    """Return how many times as long as `own` the fastest of `others` takes: the median of the rounds' ratios."""
    rounds = zip(times[own], *(times[other] for other in others), strict=True)
    return float(median(min(theirs) / mine for mine, *theirs in rounds))
