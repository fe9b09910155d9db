"""Without free descriptors or threads, all ranks raise an error that names the limit."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
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
_PR_SET_DUMPABLE = 4


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


def be_asked_for_the_state():
    no_threads()
    try:
        for number in (signal.SIGURG, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    finally:
        threading.stack_size(0)
    return dist.all_reduce(np.ones(3)).tolist()


def test_a_signal_that_asks_for_the_state_fails_no_call(new_workers):
    workers = new_workers(2)
    workers.start(be_asked_for_the_state)
    assert workers.gather() == [[2.0] * 3] * 2


# ---- Limits of processes, which do not bind root, and of memory


def become_another_user():
    """Give up the rights of root; peers of the same user may then still look into this process."""
    number = 40_000 + os.getppid() % 20_000
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def begin_without_processes(kind):
    become_another_user()
    dist.barrier()
    group = dist.new_group(group_desc="poor")
    if dist.get_rank() == VICTIM:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if kind == "all_reduce":
        return attempt(lambda: group.all_reduce(np.ones(3), async_op=True).wait()), attempt(group.barrier)
    return attempt(lambda: group.irecv(np.ones(1 << 20), 1 - dist.get_rank()).wait()), attempt(group.barrier)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("kind", ["all_reduce", "message"])
@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp"])
def test_a_rank_whose_user_may_have_no_more_processes(new_workers, backend, kind):
    workers = new_workers(2, backend, timeout_s=20.0)
    workers.start(begin_without_processes, kind)
    for failures in workers.gather():
        for failure in failures:
            assert issubclass(failure.kind, dist.DistError), failure
            assert "no thread is left" in failure.message, failure
            assert "ulimit -u" in failure.message, failure


def little_memory(kind):
    group = None if kind == "objects" else dist.new_group(group_desc="poor")
    x = np.ones(1 << 20)
    objects = [None] * dist.get_world_size()
    large = bytes(64 << 20)
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    if dist.get_rank() == VICTIM:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), unlimited[1]))
    try:
        if kind == "objects":
            return attempt(lambda: dist.all_gather_object(objects, large))
        if kind == "all_reduce":
            return attempt(lambda: group.all_reduce(x))
        other = 1 - dist.get_rank()
        return attempt(lambda: group.send(x, other) if other == 0 else group.recv(x, other))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)


@pytest.mark.parametrize("kind", ["all_reduce", "message"])
def test_a_rank_without_memory_for_what_it_shares(new_workers, kind):
    workers = new_workers(2, timeout_s=20.0)
    workers.start(little_memory, kind)
    for failure in workers.gather():
        assert failure.kind is dist.DistBackendError, failure
        assert "bytes of shared memory are not available: Cannot allocate memory" in failure.message, failure
        assert failure.took_s < loaded(DETECTED_S), failure


def test_a_rank_without_memory_for_an_object(new_workers):
    workers = new_workers(2, timeout_s=20.0)
    workers.start(little_memory, "objects", ranks=[VICTIM])
    failure = workers.outcome(VICTIM)
    assert failure.kind is MemoryError, failure
    assert "no memory is left to pickle an object of type bytes" in failure.message, failure
