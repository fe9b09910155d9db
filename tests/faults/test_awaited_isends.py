"""Ranks that wait for each other where one waits for an `isend`: all raise, unless they may do something else."""

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
LONG = 300_000
ADVICE = "\n  post an irecv before the send, or call sendrecv, which does both at once"


def in_a_ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    return attempt(lambda: dist.isend(np.ones(LONG), (rank + 1) % size).wait())


def of_a_known_kind():
    """As in a ring, after messages of the same kind, which are posted in another way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        work = dist.isend(np.ones(LONG), (rank + 1) % size)
        dist.recv(np.ones(LONG), (rank - 1) % size)
        work.wait()
    return in_a_ring()


def as_a_batch():
    dst = (dist.get_rank() + 1) % dist.get_world_size()
    return attempt(
        lambda: [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, np.ones(LONG), dst)])]
    )


def to_both_sides():
    """The sends to the rank before are in progress as well, and end no wait of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = [dist.P2POp(dist.isend, np.ones(LONG), (rank + by) % size) for by in (1, -1)]
    return attempt(lambda: [work.wait() for work in dist.batch_isend_irecv(ops)])


def two_to_each():
    rank, size = dist.get_rank(), dist.get_world_size()
    works = [dist.isend(np.ones(LONG), (rank + 1) % size, tag=tag) for tag in (1, 2)]
    return attempt(lambda: [work.wait() for work in works])


def with_a_send():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        return attempt(lambda: dist.send(np.ones(LONG), 1))
    return attempt(lambda: dist.isend(np.ones(LONG), (rank + 1) % size).wait())


PROGRAMS = [in_a_ring, of_a_known_kind, as_a_batch, to_both_sides, two_to_each, with_a_send]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_rank_raises_that_waits_for_an_isend_in_a_cycle(new_workers, program, backend):
    for rank, failure in enumerate(outcomes_of(new_workers, program, 3, backend)):
        assert failure.kind is dist.DistBackendError, failure
        assert f"(rank {rank} of 3): deadlock: the ranks wait for each other, and none can proceed\n" in failure.message
        waits = re.findall(r"rank (\d) waits for rank (\d) in i?send\(", failure.message)
        assert waits == [("0", "1"), ("1", "2"), ("2", "0")], failure
        assert failure.message.endswith(ADVICE)
        assert failure.took_s < 30.0


def wait_with_a_limit(group, rank):
    """Rank 0 waits for some seconds only, and then receives what the other sends."""
    x, peer = np.ones(LONG), 1 - rank
    work = group.isend(x, peer)
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError, match="the call continues"):
            work.wait(LATE_S)
        group.recv(np.ones(LONG), peer)
        work.wait()
    else:
        work.wait()
        group.recv(np.ones(LONG), peer)


def wait_beside_a_receive(group, rank):
    """Rank 0 receives the message of rank 1 while both wait for their sends."""
    peer = 1 - rank
    if rank == 1:
        later()
    taken = group.irecv(np.ones(LONG), peer) if rank == 0 else None
    group.isend(np.ones(LONG), peer).wait()
    if taken is None:
        group.recv(np.ones(LONG), peer)
    else:
        taken.wait()


def wait_beside_a_callback(group, rank):
    """A callback of the other send of rank 0 receives what rank 1 sends."""
    x, peer, taken = np.ones(LONG), 1 - rank, []
    if rank == 1:
        group.recv(np.ones(LONG), peer, tag=2)
        later()
        group.isend(x, peer).wait()
        group.recv(np.ones(LONG), peer)
        return
    other = group.isend(x, peer, tag=2)
    received = threading.Event()

    def receive(_):
        taken.append(group.irecv(np.ones(LONG), peer))
        received.set()

    other.get_future().add_done_callback(receive)
    group.isend(x, peer).wait()
    received.wait()
    taken[0].wait()


def wait_beside_a_thread(group, rank):
    """Another thread of rank 0, which makes no call yet, receives what rank 1 sends."""
    x, peer = np.ones(LONG), 1 - rank
    if rank == 1:
        group.isend(x, peer).wait()
        group.recv(np.ones(LONG), peer)
        return
    thread = threading.Timer(LATE_S, lambda: group.recv(np.ones(LONG), peer))
    thread.start()
    group.isend(x, peer).wait()
    thread.join()


def wait_in_a_thread(group, rank):
    """The thread that waits for the isend is another one than that which receives."""
    peer = 1 - rank
    work = group.isend(np.ones(LONG), peer)
    if rank == 1:
        work.wait()
        group.recv(np.ones(LONG), peer)
        return
    thread = threading.Thread(target=work.wait)
    thread.start()
    later()
    group.recv(np.ones(LONG), peer)
    thread.join()


def wait_for_a_reader(group, rank):
    """A recv of another message reads the one that rank 0 sends, over shared memory."""
    peer = 1 - rank
    if rank == 0:
        group.isend(np.ones(LONG), peer, tag=2).wait()
        later()
        group.send(np.ones(1), peer)
        return
    group.recv(np.ones(1), peer)
    group.recv(np.ones(LONG), peer, tag=2)


def programs_that_go_on():
    group = dist.new_group()  # threads of a rank that is a thread know no other
    programs = [wait_with_a_limit, wait_beside_a_receive, wait_beside_a_callback, wait_beside_a_thread]
    for program in (*programs, wait_in_a_thread, wait_for_a_reader):
        program(group, dist.get_rank())
        group.barrier()
    return "done"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_as_long_as_its_thread_may_do_more_no_rank_raises(new_workers, backend):
    assert outcomes_of(new_workers, programs_that_go_on, 2, backend) == ["done"] * 2


def another_send_ends(with_callback):
    """Ranks 0 and 1 wait for each other until rank 2 takes another send of rank 0, which then receives from rank 1."""
    rank, x, y = dist.get_rank(), np.ones(LONG), np.ones(LONG)
    group = dist.new_group()
    group.barrier()
    if rank == 2:
        later()
        group.recv(x, 0)
    elif rank == 1:
        group.isend(x, 0).wait()
        group.recv(x, 0)
    else:
        other, taken = group.isend(x, 2), []
        if with_callback:
            other.get_future().add_done_callback(lambda future: taken.append(group.irecv(y, 1)))
            group.isend(x, 1).wait()
        else:
            work = group.isend(x, 1)
            other.wait()
            taken.append(group.irecv(y, 1))
            work.wait()
        taken[0].wait()
    group.barrier()
    return "done"


def another_send_ends_first():
    return [another_send_ends(with_callback) for with_callback in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_sends_that_let_the_rank_go_on_are_no_cycle(new_workers, backend):
    assert outcomes_of(new_workers, another_send_ends_first, 3, backend) == [["done"] * 2] * 3


def interrupted():
    """Rank 0 leaves its wait, and later receives what the others send, who wait for each other meanwhile."""
    rank, x = dist.get_rank(), np.ones(LONG)
    dist.barrier()
    if rank == 0:
        work = dist.isend(x, 1)
        report("waits")
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        report("has left")
        later()
        dist.recv(np.ones(LONG), 2)
        work.wait()
    elif rank == 1:
        dist.isend(x, 2).wait()
        dist.recv(np.ones(LONG), 0)
    else:
        later(3.0)
        report("waits for rank 0")
        dist.isend(x, 0).wait()
        dist.recv(np.ones(LONG), 1)
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
