"""The end of a world: destroy and init again, exit without, what is outstanding; nothing grows meanwhile."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from worlds import WorkerSet, worker_rank

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


def held():
    """Return how many file descriptors and threads this process holds."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.fixture
def pair(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        yield workers


@pytest.fixture(params=["tcp", "file"])
def url(request, port, tmp_path):
    return f"tcp://127.0.0.1:{port}" if request.param == "tcp" else f"file://{tmp_path}/meet"


# ---- Again and again


def again_and_again(url, count):
    """Return what the process holds after the first and after the last world."""
    counts = []
    for step in range(count):
        dist.init_process_group("gloo", init_method=url, rank=worker_rank(), world_size=2, timeout=20)
        assert dist.all_reduce(np.full(3, step)).tolist() == [2 * step] * 3
        group = dist.new_group()
        group.all_reduce(np.ones(50_000), async_op=True).wait()
        if dist.get_rank() == 0:
            dist.send(np.ones(3), 1)
        else:
            dist.recv(np.ones(3), 0)
        dist.destroy_process_group()
        counts.append(held())
    return counts[0], counts[-1]


@pytest.mark.slow
def test_init_and_destroy_20_times(pair, url):
    pair.start(again_and_again, url, 20)
    for first, last in pair.gather():
        assert last == first


def again_in_one_store(path, count):
    counts = []
    with dist.FileStore(path) as store:
        for step in range(count):
            dist.init_process_group("gloo", store=store, rank=worker_rank(), world_size=2, timeout=20)
            assert int(dist.all_reduce(np.array(step))) == 2 * step
            dist.destroy_process_group()
            counts.append(held())
    return counts[0], counts[-1]


@pytest.mark.slow
def test_init_and_destroy_20_times_with_one_store(pair, tmp_path):
    pair.start(again_in_one_store, str(tmp_path / "store"), 20)
    for first, last in pair.gather():
        assert last == first


def many_groups(count, with_messages):
    dist.barrier()
    counts = []
    for step in range(count):
        group = dist.new_group()
        assert int(group.all_reduce(np.array(step))) == 2 * step
        group.all_reduce(np.ones(30_000), async_op=True).wait()
        if with_messages and dist.get_rank() == 0:
            dist.send(np.ones(3), 1, group=group)
        elif with_messages:
            dist.recv(np.ones(3), 0, group=group)
        counts.append(held())
    return counts[2], counts[-1]


@pytest.mark.parametrize("with_messages", [False, True], ids=["collectives", "messages"])
@pytest.mark.slow
def test_descriptors_and_threads_are_flat_over_200_groups(pair, with_messages):
    pair.join()
    pair.start(many_groups, 200, with_messages)
    for early, late in pair.gather():
        # The progress thread may hold one or two for a moment.
        assert late[0] <= early[0] + 2
        assert late[1] == early[1]


# ---- The end


SCRIPT = """
import numpy as np, meshdist as dist
dist.init_process_group("gloo")
dist.all_reduce(np.ones(3), async_op=True).wait()
print("last line")
"""


@pytest.mark.parametrize(("num_ranks", "said"), [(1, 0), (2, 1)])
def test_exit_without_destroy_is_clean_and_several_ranks_say_so_once(tmp_path, num_ranks, said):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "-n", str(num_ranks), "script.py"]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    assert (process.returncode, process.stdout) == (0, "last line\n" * num_ranks)
    assert process.stderr.count("destroy_process_group") == said
    assert len(process.stderr.splitlines()) == said


def destroy_with_work_outstanding():
    dist.barrier()
    if dist.get_rank() == 1:
        dist.recv(np.zeros(1), 0)  # rank 0 is about to leave
        dist.destroy_process_group()
        return None
    work = dist.all_reduce(np.ones(3), async_op=True)
    dist.send(np.zeros(1), 1)
    dist.destroy_process_group()
    with pytest.raises(dist.DistError, match="all_reduce on group 'world'"):
        work.wait(timeout=10.0)
    return work.is_completed(), work.is_success()


def test_destroy_ends_what_is_outstanding(pair):
    pair.join()
    start = time.monotonic()
    pair.start(destroy_with_work_outstanding)
    assert pair.gather() == [(True, False), None]
    assert time.monotonic() - start < 10


def finish_work_in_destroy():
    dist.barrier()
    x = np.full(30_000, dist.get_rank())
    work = dist.all_reduce(x, async_op=True)
    dist.destroy_process_group()
    return work.wait(timeout=10.0), set(x.tolist())


def test_destroy_finishes_calls_that_all_ranks_have_made(pair):
    pair.join()
    pair.start(finish_work_in_destroy)
    assert pair.gather() == [(True, {1}), (True, {1})]


def abort_the_world():
    dist.barrier()
    if dist.get_rank() == 0:
        dist.abort_process_group()
        assert not dist.is_initialized()
        return
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 0 .*abort_process_group"):
        dist.all_reduce(np.ones(3))
    assert time.monotonic() - start < 10


def test_abort_tells_the_others(pair):
    pair.join()
    pair.start(abort_the_world)
    pair.gather()
