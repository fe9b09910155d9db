"""Without free descriptors or threads, all ranks raise an error that names the limit."""

from __future__ import annotations

import os
import resource
import sys
import threading

import numpy as np
import pytest
from trying import attempt
from until import loaded

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
DETECTED_S = 1.0
VICTIM = 1


def no_descriptors():
    """Allow none but those that are open."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = []
    while not fillers or fillers[-1] < highest:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def first_call_of(kind):
    dist.barrier()
    group = dist.new_group(group_desc="poor")
    if dist.get_rank() == VICTIM:
        no_descriptors()
    if kind == "all_reduce":
        return attempt(lambda: group.all_reduce(np.ones(3)))
    other = 1 - dist.get_rank()
    # With as much room as none has without asking the other: both sides have to do something.
    return attempt(lambda: group.send(np.ones(1 << 20), other) if other else group.recv(np.ones(1 << 20), other))


@pytest.mark.parametrize("kind", ["all_reduce", "message"])
def test_a_rank_without_descriptors(new_workers, kind):
    workers = new_workers(2, timeout_s=20.0)
    workers.start(first_call_of, kind)
    outcomes = workers.gather()
    for failure in outcomes:
        if failure.kind is None:  # it got by with what it had
            continue
        assert issubclass(failure.kind, dist.DistError), failure
        assert "raise `ulimit -n`, which is " in failure.message, failure
        assert failure.took_s < loaded(DETECTED_S), failure
    assert len({failure.kind is None for failure in outcomes}) == 1, outcomes


def meet_without_descriptors():
    if dist.get_rank() == VICTIM:
        no_descriptors()
    return attempt(lambda: dist.all_reduce(np.ones(3)))


@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp"])
def test_a_world_whose_rank_has_no_descriptors_at_its_first_call(new_workers, backend):
    workers = new_workers(2, backend, timeout_s=20.0)
    workers.start(meet_without_descriptors)
    for failure in workers.gather():
        assert issubclass(failure.kind, dist.DistError), failure
        assert "raise `ulimit -n`, which is " in failure.message, failure
        assert failure.took_s < loaded(DETECTED_S), failure


def no_threads():
    # A stack that there is no room for: what the system says is the same.
    threading.stack_size(1 << 46)


def begin(kind):
    dist.barrier()
    group = dist.new_group(group_desc="poor")
    if dist.get_rank() == VICTIM:
        no_threads()
    try:
        if kind == "all_reduce":
            return attempt(lambda: group.all_reduce(np.ones(3), async_op=True).wait()), attempt(group.barrier)
        x = np.ones(1 << 20)
        return attempt(lambda: group.irecv(x, 1 - dist.get_rank()).wait()), attempt(group.barrier)
    finally:
        threading.stack_size(0)


@pytest.mark.parametrize("kind", ["all_reduce", "message"])
@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp"])
def test_a_rank_that_may_start_no_thread(new_workers, backend, kind):
    workers = new_workers(2, backend, timeout_s=20.0)
    workers.start(begin, kind)
    for failure, after in workers.gather():
        for each in (failure, after):
            assert issubclass(each.kind, dist.DistError), each
            assert "no thread is left" in each.message, each
            assert "ulimit -u" in each.message, each
        assert failure.took_s < loaded(DETECTED_S), failure
