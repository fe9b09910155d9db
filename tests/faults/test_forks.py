"""A forked child of a rank is detached: its calls raise, and its exit does not affect the rank."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import select
import signal
import sys
import threading
import time

import numpy as np
import pytest
from mpi_worlds import WORLDS as MPI_WORLDS
from trying import attempt
from worlds import report

import meshdist as dist
from meshdist.launch.spawn import spawn

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
AT_ONCE_S = 1.0
NO_RANK = r"belongs to rank {} \(pid {}\); this process was forked from it and is not a rank. Fork before init_process"


def in_a_fork(function):
    """Return what `function` returns in a forked process, which ends after it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        content = pipe.read() if select.select([pipe], [], [], 20)[0] else b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return pickle.loads(content) if content else "the child did not answer"


def message(group, src, dst):
    x = np.ones(1)
    if dist.get_rank() == src:
        group.send(x, dst)
    elif dist.get_rank() == dst:
        group.recv(x, src)


def forked_while_receives_are_posted():
    """Fork while another thread holds what guards the receives that are not posted yet; the child does not have it."""
    group, taken = dist.new_group(), [np.zeros(3) for _ in range(4)]
    peer = 1 - dist.get_rank()
    for array in taken:  # of a kind that is known from then on, so that the next ones are deferred
        incoming = group.irecv(array, peer)
        group.send(np.ones(3), peer)
        incoming.wait()
    works = [group.irecv(array, peer) for array in taken]
    held, forked = threading.Event(), threading.Event()

    def post():
        with group.messages.deferral._lock, group.messages.announcing._lock:
            held.set()
            forked.wait(30)

    thread = threading.Thread(target=post)
    thread.start()
    held.wait(30)
    said = in_a_fork(lambda: attempt(works[0].wait))
    forked.set()
    thread.join()
    for array in taken:
        group.send(array + 1, peer)
    for work in works:
        work.wait()
    return said, [array.tolist() for array in taken]


def calls_in_a_fork():
    rank, size = dist.get_rank(), dist.get_world_size()
    group, mesh, x, one = dist.new_group(), dist.init_device_mesh("cpu", (size,)), np.ones(3), np.ones(1)
    for each in (None, group, mesh):  # so that nothing is left to be looked up later
        dist.all_reduce(x, group=each)
    message(group, 0, 1)
    message(group, 1, 0)
    works = [group.irecv(one, 1 - rank)] if rank < 2 else []
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "method": lambda: group.all_reduce(x),
        "mesh": lambda: mesh.all_reduce(x),
        "new signature": lambda: group.all_reduce(np.ones(7)),
        "async": lambda: group.all_reduce(x, async_op=True),
        "send": lambda: group.send(one, (rank + 1) % size),
        "recv": lambda: group.recv(one, (rank + 1) % size),
        "new_group": dist.new_group,
        "get_rank": dist.get_rank,
        "destroy": dist.destroy_process_group,
    }
    if works:
        calls["work of the parent"] = works[0].wait
    said = in_a_fork(lambda: (dist.is_initialized(), {name: attempt(call) for name, call in calls.items()}))
    dist.barrier()  # a message that came before the fork would be there in the child as well
    if rank < 2:
        group.send(one, 1 - rank)
    for work in works:
        work.wait()
    return os.getpid(), said, dist.all_reduce(np.ones(3)).tolist()


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo-tcp", 3), ("gloo-hosts", 4), *MPI_WORLDS])
def test_every_call_raises_in_the_child_and_the_rank_goes_on(worlds, backend, size):
    for rank, (pid, (initialized, said), total) in enumerate(worlds.world(backend, size).run(calls_in_a_fork)):
        assert total == [size] * 3
        assert not initialized
        assert "work of the parent" in said or rank > 1
        for name, failure in said.items():
            assert failure.kind in (ValueError, dist.DistError), (name, failure)
            assert re.search(NO_RANK.format(rank, pid), failure.message), (name, failure)
            assert failure.took_s < AT_ONCE_S, (name, failure)


def another_world():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    total = dist.all_reduce(np.ones(2)).tolist()
    dist.destroy_process_group()
    return total, attempt(dist.get_rank).message


def children_of_all_kinds(rank, folder):
    dist.init_process_group("gloo", timeout=30)
    dist.barrier()
    total, after = in_a_fork(another_world)
    assert total == [1.0, 1.0]
    assert "has already been destroyed" in after
    child = os.fork()
    if child == 0:
        sys.exit(0)  # with all that is done at the end of a process
    assert os.waitpid(child, 0)[1] == 0
    process = multiprocessing.get_context("fork").Process(target=len, args=("abc",))
    process.start()
    process.join()
    assert process.exitcode == 0
    total = dist.all_reduce(np.ones(1)).item()
    dist.destroy_process_group()
    (folder / f"{rank}").write_text(f"{total}")


def test_a_fork_while_another_thread_posts_receives_does_not_hang(worlds):
    for rank, (said, taken) in enumerate(worlds.world("gloo", 2).run(forked_while_receives_are_posted)):
        assert re.search(NO_RANK.format(rank, r"\d+"), str(said))
        assert taken == [[2.0] * 3] * 4


@pytest.mark.parametrize("disable", ["0", "1"], ids=["shared memory", "tcp"])
def test_the_end_of_a_child_is_not_that_of_the_rank(tmp_path, monkeypatch, capfd, disable):
    monkeypatch.setenv("MESHDIST_DISABLE_SHM", disable)
    spawn(children_of_all_kinds, args=(tmp_path,), nprocs=2)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]
    assert "destroy_process_group" not in capfd.readouterr().err


def leave_a_child_behind(enough):
    dist.barrier()
    dist.all_reduce(np.ones(3))
    if dist.get_rank() == 1:
        if os.fork() == 0:
            end = time.monotonic() + 30
            while time.monotonic() < end and not os.path.exists(enough):
                time.sleep(0.05)
            os._exit(0)
        report("has a child")
        signal.pause()
    report("about to wait")
    return attempt(lambda: dist.recv(np.ones(3), 1))


@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp"])
def test_a_child_that_lives_on_does_not_hide_the_death_of_its_rank(new_workers, tmp_path, backend):
    enough = tmp_path / "enough"
    workers = new_workers(2, backend, timeout_s=20.0)
    workers.start(leave_a_child_behind, str(enough))
    for rank in range(2):
        workers.reported(rank)
    workers.until_asleep(0)
    killed_s = workers.signal(1, signal.SIGKILL)
    failure = workers.outcome(0)
    enough.touch()
    assert failure.kind is dist.DistBackendError, failure
    assert failure.ended_s - killed_s < AT_ONCE_S, failure
    assert f"rank 1 (pid {workers.pids[1]} on " in failure.message, failure
