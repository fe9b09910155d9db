"""Ranks that wait for each other where one waits for an `irecv`: all raise, unless its thread may do something else."""

from __future__ import annotations

import re
import signal
import sys
import threading

import numpy as np
import pytest
from cycles import BACKENDS, LATE_S, later
from trying import attempt, outcomes_of
from worlds import report

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


def in_a_ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    return attempt(lambda: dist.irecv(np.ones(4), (rank - 1) % size).wait())


def of_a_known_kind():
    """As in a ring, after messages of the same kind, whose receives are posted in another way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        work = dist.irecv(np.ones(4), (rank - 1) % size)
        dist.send(np.ones(4), (rank + 1) % size)
        work.wait()
    return in_a_ring()


def with_a_recv():
    call = [lambda: dist.irecv(np.ones(4)).wait(), *2 * [lambda: dist.recv(np.ones(4), src=0)]][dist.get_rank()]
    return attempt(call)


WAITS = {in_a_ring: "201", of_a_known_kind: "201", with_a_recv: "?00"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", WAITS)
def test_every_rank_raises_that_waits_for_an_irecv_in_a_cycle(new_workers, program, backend):
    failures = outcomes_of(new_workers, program, 3, backend)
    for rank, failure in enumerate(failures):
        assert failure.kind is dist.DistBackendError, failure
        assert (
            f"(rank {rank} of 3): deadlock: the ranks wait for each other, and none can proceed\n  rank "
            in failure.message
        )
        waits = re.findall(r"rank (\d) waits for (rank (\d)|a message from any rank) in i?recv\(", failure.message)
        assert {int(one): other or "?" for one, _, other in waits} == dict(enumerate(WAITS[program])), failure
        assert failure.took_s < 30.0


def wait_with_a_limit(group, rank):
    """Rank 0 waits for some seconds only, and then sends what the other waits for."""
    peer = 1 - rank
    if rank == 1:
        answer(group)
        return
    work = group.irecv(np.ones(1), peer)
    with pytest.raises(dist.DistTimeoutError, match="the call continues"):
        work.wait(LATE_S)
    group.send(np.ones(1), peer)
    work.wait()


def wait_beside_another(group, rank):
    """A callback of the other receive of rank 0 sends what rank 1 waits for."""
    x, peer = np.ones(1), 1 - rank
    if rank == 1:
        later()
        group.send(x, peer, tag=2)
        group.recv(x, peer)
        group.send(x, peer)
        return
    work, other = group.irecv(np.ones(1), peer), group.irecv(np.ones(1), peer, tag=2)
    other.get_future().add_done_callback(lambda future: group.isend(x, peer))
    work.wait()
    other.wait()


def answer(group):
    x = np.ones(1)
    group.recv(x, 0)
    group.send(x, 0)


def wait_beside_a_thread(group, rank):
    peer = 1 - rank
    if rank == 1:
        answer(group)
        return
    thread = threading.Timer(LATE_S, lambda: group.send(np.ones(1), peer))
    thread.start()
    group.irecv(np.ones(1), peer).wait()
    thread.join()


def wait_in_a_thread(group, rank):
    """The thread that waits for the irecv is another one than that which sends."""
    peer = 1 - rank
    if rank == 1:
        answer(group)
        return
    work = group.irecv(np.ones(1), peer)
    thread = threading.Thread(target=work.wait)
    thread.start()
    later()
    group.send(np.ones(1), peer)
    thread.join()


def programs_that_go_on():
    group = dist.new_group()  # threads of a rank that is a thread know no other
    for program in (wait_with_a_limit, wait_beside_another, wait_beside_a_thread, wait_in_a_thread):
        program(group, dist.get_rank())
        group.barrier()
    return "done"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_as_long_as_its_thread_may_do_more_no_rank_raises(new_workers, backend):
    assert outcomes_of(new_workers, programs_that_go_on, 2, backend) == ["done"] * 2


def interrupted():
    """Rank 0 leaves its wait, and later sends what the others wait for, who wait for each other meanwhile."""
    rank, x = dist.get_rank(), np.ones(1)
    dist.barrier()
    if rank == 0:
        work = dist.irecv(np.ones(1), 1)
        report("waits")
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        report("has left")
        later()
        dist.send(x, 2)
        work.wait()
    elif rank == 1:
        dist.recv(x, 2)
        dist.send(x, 0)
    else:
        later(3.0)
        report("waits for rank 0")
        dist.recv(x, 0)
        dist.send(x, 1)
    return "done"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp", "gloo-hosts"])
def test_who_leaves_the_wait_by_ctrl_c_waits_no_more(new_workers, backend):
    workers = new_workers(3, backend, timeout_s=60.0)
    workers.start(interrupted)
    assert workers.reported(0) == "waits"
    later(2.0)  # rank 0 has told the others that it waits for rank 1
    workers.signal(0, signal.SIGINT)
    assert workers.reported(0) == "has left"
    assert workers.reported(2) == "waits for rank 0"
    assert [workers.outcome(rank) for rank in range(3)] == ["done"] * 3
