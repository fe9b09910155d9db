"""A sleeping rank is woken by the event that it waits for, not by the end of its poll interval."""

import statistics
import sys
import time
from unittest import mock

import numpy as np
import pytest
from worlds import report

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
ROUNDS = 9
# Naps are long here, so that waking up at their end cannot be taken for waking up at once, on a busy machine either.
LONG_NAPS = mock.patch("meshdist.runtime.waiting.LONGEST_POLL_INTERVAL_S", 2.0)
# A long message goes through a ring that holds a small part of it.
KINDS = {"message": 3, "long message": 1 << 19, "barrier": 0, "of any rank": 3, "long, of any rank": 1 << 19}
WOKEN_S = 1.0


@LONG_NAPS
def waits(kind, used_before):
    group = dist.new_group([0, 1])
    if used_before:
        other_side(group, kind, receives=True)
    report("about to wait")
    other_side(group, kind, receives=True)
    return time.monotonic()


@LONG_NAPS
def comes(kind, used_before):
    group = dist.new_group([0, 1])
    if used_before:
        other_side(group, kind, receives=False)
    report("used")
    dist.recv(np.ones(1), 2)  # the other one sleeps
    came_s = time.monotonic()
    other_side(group, kind, receives=False)
    return came_s


def other_side(group, kind, receives):
    if kind == "barrier":
        group.barrier()
    elif receives:
        group.recv(np.ones(KINDS[kind]), None if "any" in kind else 1)
    else:
        group.send(np.ones(KINDS[kind]), 0)


def says_go():
    dist.new_group()
    dist.send(np.ones(1), 1)


@pytest.mark.parametrize(
    ("kind", "used_before"),
    [
        ("message", True),
        ("long message", True),
        ("barrier", True),
        ("barrier", False),
        ("of any rank", True),
        ("of any rank", False),
        ("long, of any rank", False),
    ],
)
@pytest.mark.parametrize("backend", ["gloo", "gloo-slots"])
def test_a_sleeper_is_woken_at_once(new_workers, backend, kind, used_before):
    workers = new_workers(3, backend)
    took_s = []
    for _ in range(ROUNDS):
        workers.start(waits, kind, used_before, ranks=[0])
        workers.start(comes, kind, used_before, ranks=[1])
        workers.reported(0)
        workers.reported(1)
        workers.until_asleep(0)
        workers.start(says_go, ranks=[2])
        workers.outcome(2)
        took_s.append(workers.outcome(0) - workers.outcome(1))
    assert statistics.median(took_s) < WOKEN_S, [round(each_s, 4) for each_s in took_s]


@LONG_NAPS
def first_calls(kind, rounds):
    dist.barrier()
    took_s = []
    for _ in range(rounds):
        group = dist.new_group([0, 1])
        start = time.monotonic()
        other_side(group, kind, receives=dist.get_rank() == 0)
        took_s.append(time.monotonic() - start)
    dist.barrier()
    return took_s


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["gloo", "gloo-slots"])
def test_first_calls_do_not_wait_for_the_end_of_a_nap(new_workers, backend, kind):
    """Both come at about the same time, again and again: hardly ever is a ring lost."""
    workers = new_workers(2, backend)
    workers.start(first_calls, kind, 30)
    for took_s in workers.gather():
        assert sum(each_s > WOKEN_S for each_s in took_s) <= 5, [round(each_s, 4) for each_s in took_s]


def waits_while_time_stands_still(kind):
    # What was looked for a moment ago is not looked for again for a while: here, until somebody goes to sleep.
    with mock.patch("meshdist.backends.gloo.published.time") as clock:
        clock.monotonic.return_value = 0.0
        group = dist.new_group([0, 1], timeout=5)
        report("about to wait")
        other_side(group, kind, receives=True)


def comes_first(kind):
    other_side(dist.new_group([0, 1], timeout=5), kind, receives=False)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_woken_looks_even_if_it_has_just_looked(new_workers, kind):
    workers = new_workers(2)
    workers.start(waits_while_time_stands_still, kind, ranks=[0])
    workers.reported(0)
    workers.until_asleep(0)
    workers.start(comes_first, kind, ranks=[1])
    assert (workers.outcome(0), workers.outcome(1)) == (None, None)
