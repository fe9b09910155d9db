"""Unexpected messages are buffered up to a limit; then only their sender waits."""

from __future__ import annotations

import resource
import sys

import numpy as np
import pytest
from worlds import report

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo runs on Linux only"),
]
MESSAGE_BYTES = 64 << 10
# More than what is kept and what the system's largest buffers hold.
NUM_MESSAGES = 1600
# Bytes of many times what the system buffers.
LONG_COUNT = 400_000
MOST_GROWTH_KB = 60 << 10


def flood():
    works = [dist.isend(np.full(MESSAGE_BYTES // 8, number), 1) for number in range(NUM_MESSAGES)]
    with pytest.raises(dist.DistTimeoutError):
        works[-1].wait(1.0)
    report("held up")
    for work in works:
        work.wait()


def be_flooded():
    message = np.zeros(MESSAGE_BYTES // 8, int)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dist.recv(np.zeros(1), 2)  # which keeps what else comes meanwhile
    growth_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    for number in range(NUM_MESSAGES):
        dist.recv(message, 0)
        assert (message == number).all(), (message[0], number)
    return growth_kb


def release():
    dist.send(np.zeros(1), 1)


def meet():
    dist.barrier()


def test_a_flood_is_held_up_and_then_comes_whole(tcp_workers):
    workers = tcp_workers(3, timeout_s=60.0)
    workers.start(meet)
    workers.gather()
    workers.start(be_flooded, ranks=[1])
    workers.start(flood, ranks=[0])
    assert workers.reported(0) == "held up"
    workers.start(release, ranks=[2])
    assert workers.outcome(2) is None
    growth_kb = workers.outcome(1)
    assert growth_kb < MOST_GROWTH_KB
    assert workers.outcome(0) is None


def cross():
    """Both send more than is kept before either receives; each waits for the other, so all goes through."""
    rank = dist.get_rank()
    x = np.zeros(MESSAGE_BYTES // 8, int)
    works = [dist.isend(np.full(MESSAGE_BYTES // 8, number), 1 - rank, tag=1) for number in range(NUM_MESSAGES // 2)]
    works.append(dist.isend(np.ones(1), 1 - rank, tag=2))
    dist.recv(np.ones(1), 1 - rank, tag=2)
    for number in range(NUM_MESSAGES // 2):
        dist.recv(x, 1 - rank, tag=1)
        assert (x == number).all(), (x[0], number)
    for work in works:
        work.wait()


def test_what_is_waited_for_comes_past_any_number_of_others(tcp_workers):
    workers = tcp_workers(2, timeout_s=60.0)
    workers.start(cross)
    workers.gather()


def send_then_sum():
    sent = dist.isend(np.full(LONG_COUNT, 7.0), 1)
    total = dist.all_reduce(np.ones(LONG_COUNT))
    sent.wait()
    return set(total)


def receive_then_sum():
    message = np.zeros(LONG_COUNT)
    dist.recv(message, 0)
    return set(message) | set(dist.all_reduce(np.ones(LONG_COUNT)))


def test_a_long_message_is_not_held_up_by_a_collective_that_its_receiver_comes_to_later(tcp_workers):
    """Between the announcement of the message and its bytes come those of the collective, which nobody asked for."""
    workers = tcp_workers(2, timeout_s=8.0)
    for _ in range(5):
        workers.start(send_then_sum, ranks=[0])
        workers.start(receive_then_sum, ranks=[1])
        assert [workers.outcome(rank) for rank in range(2)] == [{2.0}, {7.0, 2.0}]
