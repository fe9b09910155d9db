"""However the ranks end, no process, socket, shared memory or file is left."""

import gc
import os
import pathlib
import signal
import sys
import threading

import numpy as np
import pytest
from shared_files import assert_none_stays, shared_files
from until import until
from worlds import report

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
BOTH_PATHS = pytest.mark.parametrize("backend", ["gloo", "gloo-slots", "gloo-tcp"])


def do_everything():
    """Use all there is: both ways of data, messages of both kinds, groups, async calls."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [None, dist.new_group()]
    if rank in (0, size - 1):
        groups.append(dist.new_group([0, size - 1]))
    for group in groups:
        for count in (3, 1 << 19):
            dist.all_reduce(np.ones(count), group=group)
            dist.all_reduce(np.ones(count), group=group, async_op=True).wait()
    for count in (3, 100_000):
        if rank == 0:
            dist.send(np.ones(count), 1)
        elif rank == 1:
            dist.recv(np.ones(count), 0)


def sockets_of(pid):
    """Return the abstract addresses of the sockets of a process."""
    inodes = set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return {line.split()[7] for line in unix_sockets() if line.split()[6] in inodes and len(line.split()) > 7}


def unix_sockets():
    return pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]


def mapped_files(pid):
    """Return the files with "meshdist" in their name that a process has mapped or open."""
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split(None, 5)[5] for line in maps if line.count(" ") >= 5 and len(line.split(None, 5)) == 6}
    libraries = (".py", ".pyc", ".so")
    return {name for name in mapped if "meshdist" in os.path.basename(name) and not name.endswith(libraries)}


@pytest.fixture
def traces(tmp_path):
    """Check after the test that nothing is left of what the observed workers had."""

    class Traces:
        def __init__(self):
            self.sockets, self.pids = set(), []

        def look(self, workers):
            self.pids += workers.pids
            for pid in workers.pids:
                self.sockets |= {name for name in sockets_of(pid) if name.startswith("@meshdist")}
            assert self.sockets, "ranks that slept have a socket"

    before, traces = shared_files(), Traces()
    yield traces
    # The kernel may take a moment to take a killed process apart.
    until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in traces.pids), "the processes are gone")
    until(lambda: not any(name in "\n".join(unix_sockets()) for name in traces.sockets), "the sockets are closed")
    assert_none_stays(before)
    assert list(tmp_path.iterdir()) == []


def idle_after_everything():
    do_everything()
    report("done")
    dist.recv(np.ones(1), (dist.get_rank() + 1) % dist.get_world_size())


@BOTH_PATHS
def test_all_killed_at_once(new_workers, traces, tmp_path, backend):
    workers = new_workers(3, backend, TMPDIR=str(tmp_path))
    workers.start(idle_after_everything)
    for rank in range(workers.size):
        workers.reported(rank)
        workers.until_asleep(rank)
    traces.look(workers)
    for rank in range(workers.size):
        workers.signal(rank, signal.SIGKILL)
    for rank in range(workers.size):
        assert workers.ended(rank)


def everything_then_destroy():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    do_everything()
    report("done")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    after = len(os.listdir("/proc/self/fd"))
    ours = {name for name in sockets_of(os.getpid()) if name.startswith("@meshdist")}
    return after <= before, ours, mapped_files(os.getpid()), threading.active_count()


@BOTH_PATHS
def test_destroy_gives_everything_back(new_workers, traces, tmp_path, backend):
    """In processes that live on: no descriptors, sockets, mappings or threads."""
    workers = new_workers(3, backend, TMPDIR=str(tmp_path))
    workers.start(everything_then_destroy)
    for rank in range(workers.size):
        workers.reported(rank)
    for rank in range(workers.size):
        assert workers.outcome(rank) == (True, set(), set(), 1)


def everything_then_exit():
    do_everything()
    report("done")
    dist.barrier()
    sys.exit(0)


@BOTH_PATHS
def test_nothing_is_on_disk_while_it_runs(new_workers, tmp_path, backend):
    """Shared memory is anonymous: there is nothing to leave behind."""
    before = shared_files()
    workers = new_workers(3, backend, TMPDIR=str(tmp_path))
    workers.start(idle_after_everything)
    for rank in range(workers.size):
        workers.reported(rank)
        workers.until_asleep(rank)
    assert_none_stays(before)
    assert list(tmp_path.iterdir()) == []
    for pid in workers.pids:
        assert {name for name in mapped_files(pid) if not name.startswith("/memfd:")} == set()


def broken_then_destroy():
    group = dist.new_group()
    try:
        group.all_reduce(np.ones(3 + dist.get_rank()))
    except dist.DistBackendError:
        dist.destroy_process_group()
    gc.collect()
    return mapped_files(os.getpid()), threading.active_count(), dist.is_initialized()


def test_destroy_after_a_failure(new_workers, tmp_path):
    workers = new_workers(2, TMPDIR=str(tmp_path))
    workers.start(broken_then_destroy)
    assert workers.gather() == [(set(), 1, False)] * 2


def destroy_after_a_death():
    report("about to wait")
    try:
        dist.barrier()
    except dist.DistBackendError:
        dist.destroy_process_group()
    gc.collect()
    return mapped_files(os.getpid()), threading.active_count(), dist.is_initialized()


def test_destroy_after_the_death_of_a_rank(new_workers, tmp_path):
    workers = new_workers(3, TMPDIR=str(tmp_path))
    workers.start(destroy_after_a_death, ranks=[0, 2])
    for rank in (0, 2):
        workers.reported(rank)
        workers.until_asleep(rank)
    workers.signal(1, signal.SIGKILL)
    for rank in (0, 2):
        assert workers.outcome(rank) == (set(), 1, False)
