"""On machines without some feature or permission, calls are slower but right, or name what is missing."""

import errno
import os
import signal
import sys

import numpy as np
import pytest
from shared_files import assert_none_stays, shared_files
from trying import attempt
from until import loaded
from without_features import with_one_rank_that_does_not_read, without_memfd
from worlds import report, worker_rank

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


def without_pidfd():
    if hasattr(os, "pidfd_open"):
        del os.pidfd_open


def with_pidfd_forbidden():
    def pidfd_open(pid, flags=0):
        raise OSError(errno.ENOSYS, "not on this kernel")

    os.pidfd_open = pidfd_open


def with_memfd_forbidden():
    def memfd_create(name, flags=0):
        raise PermissionError(errno.EPERM, "not in this sandbox")

    os.memfd_create = memfd_create


LACKS = {
    "no memfd": without_memfd,
    "memfd forbidden": with_memfd_forbidden,
    "no pidfd": without_pidfd,
    "pidfd forbidden": with_pidfd_forbidden,
    "one rank does not read others": with_one_rank_that_does_not_read,
}


def work():
    """Use it all. A file that stands in for anonymous memory is removed as soon as all have it, not at the end."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in (3, 5000, 1 << 20):
        x = dist.all_reduce(np.full(count, rank))
        assert set(x.tolist()) == {sum(range(size))}
        blocks = dist.all_gather([np.zeros(count, int) for _ in range(size)], np.full(count, rank))
        assert [set(block.tolist()) for block in blocks] == [{other} for other in range(size)]
        y = np.full(count, rank)
        if rank == 0:
            dist.send(y, size - 1)
        elif rank == size - 1:
            dist.recv(y, 0)
            assert set(y.tolist()) == {0}
    return int(dist.new_group().all_reduce(np.array(1)))


def wait_for_rank_1():
    report("about to wait")
    return attempt(lambda: dist.all_reduce(np.ones(3)))


@pytest.fixture
def _nothing_on_disk():
    before = shared_files()
    yield
    assert_none_stays(before)


@pytest.mark.usefixtures("_nothing_on_disk")
@pytest.mark.parametrize("lack", LACKS)
def test_it_works_all_the_same(new_workers, lack, tmp_path):
    workers = new_workers(3, join=False, TMPDIR=str(tmp_path))
    workers.start(LACKS[lack])
    workers.gather()
    workers.join()
    workers.start(work)
    assert workers.gather() == [3, 3, 3]
    assert list(tmp_path.iterdir()) == []
    workers.start(wait_for_rank_1, ranks=[0, 2])
    for rank in (0, 2):
        workers.reported(rank)
        workers.until_asleep(rank)
    killed_s = workers.signal(1, signal.SIGKILL)
    for rank in (0, 2):
        failure = workers.outcome(rank)
        assert failure.kind is dist.DistBackendError, failure
        assert f"rank 1 (pid {workers.pids[1]} on " in failure.message, failure
        assert failure.ended_s - killed_s < loaded(1.0), failure


def live_on_another_host():
    os.environ["MESHDIST_HOST_ID"] = f"host {worker_rank()}"


def talk():
    x = np.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x.tolist(), dist.new_subgroups()[0].ranks


def test_ranks_of_two_hosts_are_told_apart_and_talk_all_the_same(new_workers):
    workers = new_workers(2, join=False)
    workers.start(live_on_another_host)
    workers.gather()
    workers.join()
    workers.start(talk)
    assert workers.gather() == [([2.0] * 3, (rank,)) for rank in range(2)]
