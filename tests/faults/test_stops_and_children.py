"""Ranks that are stopped for moments, or start processes of all kinds, while calls are under way: no call notices."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from worlds import RankFailedError, report

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "gloo-tcp"])
NUM_STOPS = 20
LONGEST_STOP_S = 0.02
NUM_IN_FLIGHT = 60


def calls_until(enough):
    """Make calls of all kinds, each checked, until the file is there; return how many rounds."""
    rank, size, number, more = dist.get_rank(), dist.get_world_size(), 0, np.array([True])
    after, before = (rank + 1) % size, (rank - 1) % size
    while more[0]:
        number += 1
        for count in (1, 5_000, 200_000):
            x = np.full(count, rank + number)
            total = size * number + sum(range(size))
            work = dist.all_reduce(x.copy(), async_op=True)
            assert set(dist.all_reduce(x.copy()).tolist()) == {total}
            sent, received = dist.isend(x, after), np.empty_like(x)
            dist.recv(received, before)
            assert set(received.tolist()) == {before + number}
            sent.wait()
            assert set(work.result().tolist()) == {total}
        dist.barrier()
        more[0] = not os.path.exists(enough)
        dist.broadcast(more, 0)
    return number


@BACKENDS
def test_ranks_that_are_stopped_at_random_go_on(new_workers, tmp_path, backend):
    workers, choice = new_workers(3, backend), random.Random(19)
    workers.start(calls_until, str(tmp_path / "enough"))
    for _ in range(NUM_STOPS):
        victim = choice.randrange(3)
        workers.signal(victim, signal.SIGSTOP)
        threading.Event().wait(choice.random() * LONGEST_STOP_S)  # the fault itself, at a moment that is what is tried
        workers.signal(victim, signal.SIGCONT)
    (tmp_path / "enough").touch()
    assert len(set(workers.gather())) == 1


def _forked():
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def _popen():
    assert subprocess.run(["true"], check=True, close_fds=True).returncode == 0


def _multiprocessing():
    process = multiprocessing.get_context("fork").Process(target=len, args=("abc",))
    process.start()
    process.join()
    assert process.exitcode == 0


def children_during_async_calls():
    rank, size = dist.get_rank(), dist.get_world_size()
    works, messages = [], []
    for number in range(NUM_IN_FLIGHT):
        works.append(dist.all_reduce(np.full(1 + 500 * (number % 20), rank + number), async_op=True))
        incoming = np.empty(3_000)
        messages.append((dist.irecv(incoming, (rank - 1) % size), incoming))
        works.append(dist.isend(np.full(3_000, float(number)), (rank + 1) % size))
        if number % 10 == rank:
            (_forked, _popen, _multiprocessing)[number // 10 % 3]()
    for number, (work, incoming) in enumerate(messages):
        work.wait()
        assert set(incoming.tolist()) == {number}
    for number, work in enumerate(works[::2]):
        assert set(work.result().tolist()) == {size * number + sum(range(size))}
    for work in works[1::2]:
        work.wait()


@BACKENDS
def test_processes_are_started_while_async_calls_are_under_way(new_workers, backend):
    workers = new_workers(3, backend)
    workers.start(children_during_async_calls)
    workers.gather()


# ---- Stopped while another rank leaves


def send_and_leave():
    dist.send(np.array([1.0, 2.0]), 1)
    report("leaves")
    dist.destroy_process_group()


def receive_when_told():
    x = np.zeros(2)
    report("there")
    dist.recv(x, 0)
    dist.destroy_process_group()
    return x.tolist()


def test_a_rank_leaves_the_world_only_when_a_stopped_one_can_receive_its_message(new_workers):
    workers = new_workers(2)
    workers.start(receive_when_told, ranks=[1])
    workers.reported(1)
    workers.signal(1, signal.SIGSTOP)
    workers.start(send_and_leave, ranks=[0])
    workers.reported(0)
    with pytest.raises(RankFailedError, match="none of the ranks"):
        workers.first_outcome([0], timeout_s=0.3)
    workers.signal(1, signal.SIGCONT)
    assert workers.outcome(1) == [1, 2]
    assert workers.outcome(0) is None
