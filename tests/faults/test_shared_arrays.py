"""Shared arrays without shared memory, without permission to open it, and after the death of a rank."""

import os
import resource
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from trying import attempt
from until import loaded, until
from without_features import logged, without_memfd
from worlds import report, worker_rank

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
COUNT = 100_000


def without_memory():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))


def without_leave():
    if worker_rank() == 1:
        opened = os.open

        def forbidden(path, *args, **how):
            if str(path).startswith("/proc/") and "/fd/" in str(path):
                raise PermissionError(13, "forbidden", path)
            return opened(path, *args, **how)

        os.open = forbidden


LACKS = {
    "no memfd": (without_memfd, "no shared memory for an array of 800000 bytes"),
    "no room": (without_memory, "no shared memory for an array of 800000 bytes"),
    "no leave to open it": (without_leave, "may not open the shared arrays of its peers"),
}


def work(lack):
    dist.barrier()  # the group's own memory is not what this is about
    LACKS[lack][0]()
    texts = logged()
    size = dist.get_world_size()
    for value in (1.0, 2.0):
        for _ in range(3):
            x, out = dist.full(COUNT, value), dist.empty(size * COUNT)
            assert (dist.all_reduce(x) == size * value).all()
            assert (dist.all_gather_into_tensor(out, x) == size * value).all()
    return texts


@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("backend", ["gloo", "gloo-slots"])
def test_calls_are_slower_and_as_right(new_workers, lack, backend):
    workers = new_workers(3, backend)
    workers.start(work, lack)
    for texts in workers.gather():
        assert len(texts) == 1, texts
        assert LACKS[lack][1] in texts[0]


def live_after_destroy():
    x = dist.full(COUNT, 1.0)
    dist.all_reduce(x)
    dist.destroy_process_group()
    x += 1
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    left = [path for path in paths if os.path.islink(path) and "meshdist-arrays" in os.readlink(path)]
    total = float(x.sum())
    del x
    until(lambda: "meshdist-arrays" not in Path("/proc/self/maps").read_text(), "its memory is given back")
    return total, left


def test_arrays_outlive_their_world_and_nothing_else_does(new_workers):
    workers = new_workers(3)
    workers.start(live_after_destroy)
    assert workers.gather() == [(4.0 * COUNT, [])] * 3


def wait_for_rank_1():
    x = dist.full(COUNT, 1.0)
    dist.all_reduce(x)
    report("about to wait")
    return attempt(lambda: dist.all_reduce(x))


def come_once():
    dist.all_reduce(dist.full(COUNT, 1.0))
    report("came")
    signal.pause()


def test_a_rank_that_dies_is_named(new_workers):
    workers = new_workers(2)
    workers.start(wait_for_rank_1, ranks=[0])
    workers.start(come_once, ranks=[1])
    workers.reported(0)
    workers.reported(1)
    killed_s = workers.signal(1, signal.SIGKILL)
    failure = workers.outcome(0)
    assert failure.kind is dist.DistBackendError, failure
    assert f"rank 1 (pid {workers.pids[1]} on " in failure.message, failure
    assert failure.ended_s - killed_s < loaded(1.0), failure


def different_arrays():
    x = np.ones(COUNT) if worker_rank() else dist.full(COUNT - 1, 1.0)
    return attempt(lambda: dist.all_reduce(x))


def test_calls_that_disagree_are_named(new_workers):
    workers = new_workers(2)
    workers.start(different_arrays)
    for failure in workers.gather():
        assert failure.kind is dist.DistBackendError
        assert "float64[99999]" in failure.message
        assert "float64[100000]" in failure.message
