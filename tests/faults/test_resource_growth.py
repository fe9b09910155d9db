"""Descriptors, threads and shared memory do not grow over many worlds, groups and calls."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from worlds import worker_rank

import meshdist as dist
from meshdist.launch.spawn import spawn

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
WORLDS, GROUPS, IN_FLIGHT = 50, 500, 5_000
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "gloo-tcp"])


# What is made once, when it is first needed: a doorbell, a watch on the peer's process, a connection.
FEW = 3
# What a group that was destroyed, or a call of new shapes, may leave on a rank: keys in the store, and a plan.
MOST_LEFT_BYTES = 8 << 10
KEPT_TO_SEND_AGAIN_BYTES = 256 << 10  # of a connection, at one moment more and at another less


def held():
    """Return how many descriptors and threads this process holds."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def stays(before, after):
    """Return whether nothing has grown with the number of what was made."""
    return all(now <= then + FEW for then, now in zip(before, after, strict=True))


def worlds_one_after_the_other(url):
    counts = []
    for step in range(WORLDS):
        dist.init_process_group("gloo", init_method=url, rank=worker_rank(), world_size=2, timeout=20)
        assert int(dist.all_reduce(np.array(step), async_op=True).result()) == 2 * step
        dist.destroy_process_group()
        counts.append(held())
    return counts


@BACKENDS
@pytest.mark.slow
def test_50_worlds_one_after_the_other(new_workers, tmp_path, backend):
    workers = new_workers(2, backend, join=False)
    workers.start(worlds_one_after_the_other, f"file://{tmp_path}/meet")
    for counts in workers.gather():
        assert counts[-1] == counts[0]


def worlds_in_the_launchers_store(rank, folder):
    gc.disable()  # which would close in the end what was forgotten
    counts = []
    for step in range(6):
        dist.init_process_group("gloo", timeout=30)
        assert int(dist.all_reduce(np.array(step))) == 2 * step
        dist.destroy_process_group()
        counts.append(held())
    (folder / f"{rank}").write_text(f"{counts[1] == counts[-1]} {counts}")


def test_worlds_in_the_store_of_a_launcher_leave_no_connection(tmp_path):
    spawn(worlds_in_the_launchers_store, args=(tmp_path,), nprocs=2)
    for rank in range(2):
        text = (tmp_path / f"{rank}").read_text()
        assert text.startswith("True"), text


def many_groups():
    counts = []
    for step in range(GROUPS):
        group = dist.new_group()
        assert int(group.all_reduce(np.array(step))) == 2 * step
        counts.append(held())
    return counts


@BACKENDS
@pytest.mark.slow
def test_500_groups_that_are_all_kept(new_workers, backend):
    workers = new_workers(2, backend, timeout_s=30.0)
    workers.start(many_groups)
    for counts in workers.gather():
        assert stays(counts[2], counts[-1])


def destroyed_groups(count, leaves_messages):
    """Return how many bytes of memory are in use after each of `count` groups, made, used and destroyed."""
    rank, used = dist.get_rank(), []
    other, x, message = 1 - rank, np.ones(1 << 18), np.ones(8 << 10)
    tracemalloc.start()
    for _ in range(count):
        group = dist.new_group()
        group.all_reduce(x)
        if leaves_messages:
            group.send(message, other)
        group.barrier()
        dist.destroy_process_group(group)
        dist.barrier()  # what the other rank said of the group has been read
        del group
        gc.collect()
        used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return used


@BACKENDS
def test_destroyed_groups_leave_no_memory_behind(new_workers, backend):
    workers = new_workers(2, backend, timeout_s=30.0)
    workers.start(destroyed_groups, 24, backend == "gloo-tcp")  # in shared memory, the sender's end waits for them
    for used in workers.gather():
        # A group that stays has its buffers, of some MiB, or a message of 64 KiB that was not received.
        assert used[-1] - used[3] < 20 * 4 * MOST_LEFT_BYTES, used


def calls_of_many_shapes(counts):
    """Return how many bytes are in use after a quarter of calls on so many elements, and after all."""
    used = []
    tracemalloc.start()
    for count in counts:
        x = np.ones(count)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        if len(used) in (len(counts) // 4, len(counts) - 1):
            gc.collect()
        used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return used[len(counts) // 4], used[-1]


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (2, "gloo-tcp"), (4, "gloo-hosts")])
def test_calls_whose_shapes_never_repeat_take_little_memory(new_workers, size, backend):
    workers = new_workers(size, backend, timeout_s=60.0)
    counts = range(1_900, 2_000)
    workers.start(calls_of_many_shapes, counts)
    for early, late in workers.gather():
        assert late - early < len(counts) * 2 * MOST_LEFT_BYTES + KEPT_TO_SEND_AGAIN_BYTES


def thousands_in_flight():
    dist.all_reduce(np.ones(1), async_op=True).wait()
    before = held()
    arrays = [np.array([dist.get_rank(), number]) for number in range(IN_FLIGHT)]
    works = [dist.all_reduce(array, async_op=True) for array in arrays]
    during = held()
    assert all(work.wait() for work in works)
    assert [array.tolist() for array in arrays] == [[1, 2 * number] for number in range(IN_FLIGHT)]
    return before, during, held()


@BACKENDS
@pytest.mark.slow
def test_5000_calls_in_flight(new_workers, backend):
    workers = new_workers(2, backend, timeout_s=60.0)
    workers.start(thousands_in_flight)
    for before, during, after in workers.gather():
        assert stays(before, during)
        assert stays(before, after)


def shared_bytes():
    """Return how much memory of this process is shared with others, in pages that it has touched."""
    total, is_ours = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name, *words = line.split()
            if not name.endswith(":"):
                is_ours = ":meshdist" in line or ("/dev/shm/" in line and "meshdist" in line)
            elif is_ours and name == "Rss:":
                total += int(words[0]) << 10
    return total


def calls_of_all_sizes():
    first = dist.new_group()
    first.barrier()  # from here on, there is what all groups of the world share
    dist.destroy_process_group(first)
    before, group, most = shared_bytes(), dist.new_group(), 0
    for count in (8, 1 << 14, 1 << 18, 1 << 21):
        x, y, part = np.ones(count, np.float32), np.ones(count, np.float32), np.ones(count // 8, np.float32)
        group.all_reduce(x)
        group.broadcast(x, 0)
        group.all_to_all_single(x, y)
        group.reduce_scatter_tensor(part, x)
        group.all_gather_into_tensor(x, part)
        most = max(most, shared_bytes() - before)
    group.barrier()
    dist.destroy_process_group(group)
    return most, shared_bytes() - before


def test_a_group_of_8_shares_little_memory_and_gives_it_back(new_workers):
    workers = new_workers(8, "gloo", timeout_s=60.0)
    workers.start(calls_of_all_sizes)
    for most, left in workers.gather():
        assert 0 < most <= 8 << 20
        assert left == 0


def switches_at_rest():
    """Return how often this process went to sleep in a second in which it does nothing."""
    x = np.ones(1)
    for _ in range(50):
        dist.all_reduce(x, async_op=True).wait()
    dist.barrier()
    threading.Event().wait(0.3)  # threads stay awake for moments after a call
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    threading.Event().wait(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before


@BACKENDS
def test_a_rank_at_rest_sleeps(new_workers, backend):
    workers = new_workers(2, backend)
    workers.start(switches_at_rest)
    assert max(workers.gather()) < 100
