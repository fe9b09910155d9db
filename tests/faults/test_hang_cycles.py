"""Ranks that wait in a cycle, or for a late rank, report it, even if one has timed out and left."""

from __future__ import annotations

import re
import sys
import threading

import numpy as np
import pytest
from trying import attempt, on_threads
from until import loaded

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
CIRCLE = "\n  the ranks wait for each other: rank "
PROVEN = ": deadlock: the ranks wait for each other, and none can proceed\n  rank "


def all_receive():
    rank, size = dist.get_rank(), dist.get_world_size()
    ring = dist.new_group(timeout=4.0 + rank / 4, group_desc="ring")
    ring.barrier()
    failure = attempt(lambda: ring.recv(np.ones(4), src=(rank - 1) % size))
    dist.destroy_process_group()
    return failure


def all_wait_for_a_posted_receive():
    rank, size = dist.get_rank(), dist.get_world_size()
    ring = dist.new_group(timeout=4.0 + rank / 4, group_desc="ring")
    ring.barrier()
    is_over = threading.Event()
    beside = threading.Thread(target=is_over.wait)  # it could send something
    beside.start()
    failure = attempt(ring.irecv(np.ones(4), src=(rank - 1) % size).wait)
    is_over.set()
    beside.join()
    dist.destroy_process_group()
    return failure


def each_waits_for_the_next():
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [
        dist.new_group([first, (first + 1) % size], timeout=6.0 + rank, group_desc=f"pair {first}")
        for first in range(size)
    ]
    for pair in pairs:
        if pair.rank() >= 0:
            pair.barrier()
    dist.barrier()
    failure = attempt(pairs[rank].barrier)
    dist.destroy_process_group()
    return failure


@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp"])
@pytest.mark.parametrize("program", [all_receive, each_waits_for_the_next])
def test_every_rank_raises_the_circle_once_it_is_proven(new_workers, program, backend):
    for failure in failures_of(new_workers, program, backend):
        assert failure.kind is dist.DistBackendError
        assert PROVEN in failure.message


def failures_of(new_workers, program, backend):
    if backend == "threads":
        workers = new_workers(1, "gloo", join=False)
        workers.start(on_threads, program, 3, 300.0)
        return workers.outcome(0)
    workers = new_workers(3, backend)
    workers.start(program)
    return [workers.outcome(rank) for rank in range(3)]


@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp"])
def test_every_rank_sees_the_circle_at_the_timeout(new_workers, backend):
    """Where ranks have other threads it is not proven, as these could end it."""
    failures = failures_of(new_workers, all_wait_for_a_posted_receive, backend)
    assert failures[0].kind is dist.DistTimeoutError
    for failure in failures:
        assert CIRCLE in failure.message, failure
        assert "not come" not in failure.message
        assert "not sent" not in failure.message
        first, *hang_report = failure.message.splitlines()
        assert failure.kind is dist.DistTimeoutError or re.search(r"; .*this is (call|message) \d, at .*:\d+$", first)
        assert not [line for line in hang_report if "this is" in line]


def test_who_gave_up_and_left_still_counts_as_having_come():
    left, enough = threading.Event(), threading.Event()

    def main():
        rank = dist.get_rank()
        first = dist.new_group([0, 1], timeout=4.0, group_desc="first")
        second = dist.new_group([1, 2], timeout=1.0, group_desc="second")
        if rank == 1:
            enough.wait(30)
            return None
        failure = attempt((first if rank == 0 else second).barrier)
        (enough if rank == 0 else left).set()
        return failure

    message = dist.run(main, 3)[0].message
    assert left.is_set()
    assert "rank 1 has not reached barrier(), call 1 on 'first'" in message
    there = re.search(
        r"rank 1 is not in a meshdist call; it has been at .* for (\d\.\d) s and has not completed any call yet",
        message,
    )
    assert there, message
    assert 3.0 <= float(there[1]) < 4.0 + loaded(1.0), message
    words = r"rank 2 was in barrier\(\), call 1 on 'second', at .*, for (\d\.\d) s, waiting for rank 1, and timed out"
    timed_out = re.search(words, message)
    assert timed_out, message
    assert 1.0 <= float(timed_out[1]) < 1.0 + loaded(1.0), message
