"""The clock of a rank's host jumps: calls, timeouts and reports go by clocks that do not."""

from __future__ import annotations

import os
import re
import sys
import time

import numpy as np
import pytest
from trying import attempt
from until import loaded, until

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
TIMEOUT_S = 3.0
DAY_S = 86_400.0


def let_the_clock_jump(jumps_s):
    """Have this process see the time of day jump, by the next of these at each look at it."""
    seconds, nanoseconds, looks = time.time, time.time_ns, [0]

    def jump():
        looks[0] += 1
        return jumps_s[looks[0] % len(jumps_s)]

    time.time = lambda: seconds() + jump()
    time.time_ns = lambda: nanoseconds() + int(1e9 * jump())


def calls_and_a_timeout(jumps_s, size, enough):
    rank = dist.get_rank()
    if rank == 1:
        let_the_clock_jump(jumps_s)
    group = dist.new_group(timeout=TIMEOUT_S)
    for count in (1, 100_000):
        assert group.all_reduce(np.ones(count)).sum() == size * count
        sent = group.isend(np.ones(count), (rank + 1) % size)
        group.recv(np.ones(count), (rank - 1) % size)
        sent.wait()
    group.barrier()
    if rank == 0:
        until(lambda: os.path.exists(enough), "the others have given up", 30.0)
        return None
    failure = attempt(lambda: group.all_reduce(np.ones(2)))
    open(enough, "w").close()
    return failure


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("gloo-tcp", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "jumps_s",
    [
        pytest.param([DAY_S, -DAY_S], id="forwards and backwards"),
        pytest.param([-DAY_S], id="behind", marks=pytest.mark.exhaustive),
        pytest.param([DAY_S], id="ahead", marks=pytest.mark.exhaustive),
    ],
)
def test_calls_and_timeouts_do_not_go_by_the_time_of_day(new_workers, tmp_path, backend, jumps_s):
    workers = new_workers(3, backend, timeout_s=20.0)
    workers.start(calls_and_a_timeout, jumps_s, 3, str(tmp_path / "enough"))
    failures = workers.gather()[1:]
    first = min(failures, key=lambda failure: failure.ended_s)
    assert first.kind is dist.DistTimeoutError, first
    assert TIMEOUT_S <= first.took_s < loaded(TIMEOUT_S + 2.0), first
    ages_s = [float(age) for failure in failures for age in re.findall(r"for (?:[\d.]+ to )?([\d.]+) s", str(failure))]
    assert ages_s
    assert max(ages_s) < 60, failures
