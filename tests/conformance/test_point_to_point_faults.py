"""isend and irecv that go wrong: arguments, misfits, broken and closed groups, limits, peers that die."""

import itertools
import os
import signal

import cases
import numpy as np
import pytest
from failing import fails
from mpi_worlds import WORLDS as MPI_WORLDS
from worlds import WorkerSet

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
KIB = cases.KIB


@pytest.fixture(params=["threads", "gloo", "gloo-slots", "gloo-tcp", *(name for name, size in MPI_WORLDS if size == 2)])
def backend(request):
    return request.param


@pytest.fixture
def world_of_2(worlds, backend):
    return worlds.world(backend, 2)


def wrong_arguments():
    rank, size, x = dist.get_rank(), dist.get_world_size(), np.zeros(1)
    for function, name in ((dist.isend, "dst"), (dist.irecv, "src")):
        where = f"{'isend' if name == 'dst' else 'irecv'} on group 'world'"
        fails(ValueError, lambda f=function: f(x, size), where, "must be a rank in the group")
        fails(ValueError, lambda f=function: f(x, (rank + 1) % size, tag=-1), where, "tag")
        fails(TypeError, lambda f=function: f(x, (rank + 1) % size, tag="one"), where, "tag")
        fails(TypeError, lambda f=function: f("text", (rank + 1) % size), where, "array")
        fails(ValueError, lambda f=function, n=name: f(x, 0, **{f"group_{n}": 0}), where, "both")
    fails(ValueError, lambda: dist.isend(x), "pass dst (a global rank) or group_dst ")
    fails(ValueError, lambda: dist.irecv(np.broadcast_to(x, (3,)), (rank + 1) % size), "irecv", "read-only")


def test_wrong_arguments_are_raised_by_the_call(world_of_2):
    world_of_2.run(wrong_arguments)


def misfit(num_bytes, asynchronous):
    # The receiver's array is of a different size: an error on both sides, at the next call if it was buffered.
    group, rank = dist.new_group(), dist.get_rank()
    if rank == 0:
        x = np.zeros(num_bytes, np.uint8)

        def until_told():
            dist.recv(np.zeros(1), 1)
            group.isend(x, 1).wait(30)

        if num_bytes > 64 * KIB:
            fails(dist.DistBackendError, group.isend(x, 1).wait, f"{num_bytes + 1}", "isend")
            dist.recv(np.zeros(1), 1)
        else:
            group.isend(x, 1).wait(30)
            fails(dist.DistBackendError, until_told, f"{num_bytes + 1}", "isend")
    else:
        y = np.full(num_bytes + 1, 7, np.uint8)
        if asynchronous:
            work = group.irecv(y, 0)
            for _ in range(2):
                fails(dist.DistBackendError, work.wait, f"uint8[{num_bytes}]", f"{num_bytes + 1}", "irecv")
            assert isinstance(work.exception(), dist.DistBackendError)
        else:
            fails(dist.DistBackendError, lambda: group.recv(y, 0), f"uint8[{num_bytes}]", f"{num_bytes + 1}", "recv")
        cases.same(set(y.tolist()), {7}, "an array that nothing fits")
        dist.send(np.zeros(1), 0)


@pytest.mark.parametrize("num_bytes", [8, 100 * KIB])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["recv", "irecv"])
def test_a_message_that_does_not_fit(worlds, backend, num_bytes, asynchronous):
    worlds.world(backend, 2).run(misfit, num_bytes, asynchronous)


def broken_while_waiting():
    # Another call breaks the group: a receipt that waits in it ends as well.
    group, rank = dist.new_group(), dist.get_rank()
    work = group.irecv(np.zeros(1), 1 - rank, tag=9)
    fails(dist.DistBackendError, lambda: group.all_reduce(np.zeros(3 + rank)), "float64")
    fails(dist.DistBackendError, lambda: work.wait(30))


def test_a_receipt_ends_with_its_group(world_of_2):
    world_of_2.run(broken_while_waiting)


def destroyed_with_receipts():
    group, rank = dist.new_group(), dist.get_rank()
    x = np.zeros(200_000)
    if rank == 0:
        work = group.isend(np.ones(200_000), 1)
    else:
        work = group.irecv(x, 0)
    dist.destroy_process_group(group)
    cases.same((work.exception(), x[0]), (None, float(rank)), "drained")


def test_destroy_drains_messages(world_of_2):
    world_of_2.run(destroyed_with_receipts)


def every_send_waits():
    x, group = np.zeros(1), dist.new_group()
    if dist.get_rank() == 0:
        work = group.isend(x, 1)
        fails(dist.DistTimeoutError, lambda: work.wait(0.05), "isend")
        go_on = dist.isend(x, 1)
        work.wait(30)
        go_on.wait(30)
    else:
        dist.recv(x, 0)
        group.recv(x, 0)


def zero_bytes():
    rank, x = dist.get_rank(), np.zeros(0)
    works = [dist.irecv(x, 1 - rank), dist.isend(x, 1 - rank)]
    for work in works:
        work.wait(30)


@pytest.mark.parametrize("single_copy", ["1", "0"])
def test_with_a_limit_of_0_every_send_waits(worlds, single_copy):
    variables = {"MESHDIST_EAGER_LIMIT": "0", "MESHDIST_SINGLE_COPY": single_copy}
    with WorkerSet(worlds.nursery, 2, variables) as workers:
        workers.join()
        for program in (every_send_waits, zero_bytes):
            workers.start(program)
            workers.gather()


def test_with_a_limit_of_0_every_send_waits_on_threads(monkeypatch):
    monkeypatch.setenv("MESHDIST_EAGER_LIMIT", "0")
    dist.run(every_send_waits, 2, timeout=30)
    dist.run(zero_bytes, 2, timeout=30)


def test_a_limit_that_is_no_number(monkeypatch):
    monkeypatch.setenv("MESHDIST_EAGER_LIMIT", "64k")
    with pytest.raises(ValueError, match=r"MESHDIST_EAGER_LIMIT.*'64k'"):
        dist.run(lambda: dist.barrier(), 2, timeout=30)


def largest_buffered(num_bytes):
    if dist.get_rank() == 0:
        dist.isend(np.ones(num_bytes, np.uint8), 1).wait(30)
        dist.isend(np.ones(num_bytes + 10_000_000, np.uint8), 1).wait(30)
    else:
        for size in (num_bytes, num_bytes + 10_000_000):
            x = np.zeros(size, np.uint8)
            dist.recv(x, 0)
            assert x.all()


def exchange_in_turns(num_bytes):
    # The isend of rank 0 completes before rank 1 begins to receive.
    rank = dist.get_rank()
    given, taken = np.full(num_bytes, rank, np.uint8), np.empty(num_bytes, np.uint8)
    for turn in range(6):
        if rank == 1:
            dist.barrier()
        works = [dist.irecv(taken, 1 - rank), dist.isend(given, 1 - rank)]
        if rank == 0:
            works[1].wait()
            dist.barrier()
        for work in works:
            work.wait()
        assert (taken == 1 - rank).all(), turn


def test_a_short_isend_of_an_exchange_does_not_wait_for_its_receiver(worlds):
    with WorkerSet(worlds.nursery, 2, {"MESHDIST_EAGER_LIMIT": str(128 * KIB)}) as workers:
        workers.join()
        workers.start(exchange_in_turns, 100_000)
        workers.gather()


def test_a_limit_beyond_the_buffers(worlds):
    with WorkerSet(worlds.nursery, 2, {"MESHDIST_EAGER_LIMIT": str(256 * KIB)}) as workers:
        workers.join()
        for num_bytes, _ in itertools.product((100_000, 128 * KIB, 300 * KIB), range(2)):
            workers.start(largest_buffered, num_bytes)
            workers.gather()


def silent_peer_dies():
    # Rank 2 has sent before and is killed: a receipt of any source must not wait for ever.
    rank = dist.get_rank()
    if rank == 2:
        dist.send(np.zeros(1), 0)
    elif rank == 0:
        x = np.zeros(1)
        dist.recv(x)
    dist.barrier()


def killed():
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    elif dist.get_rank() == 0:
        fails(dist.DistBackendError, lambda: dist.recv(np.zeros(1)), "rank 2 (pid ")


def test_a_sender_that_dies_ends_a_receipt_of_any_source(worlds):
    with WorkerSet(worlds.nursery, 3) as workers:
        workers.join()
        workers.start(silent_peer_dies)
        workers.gather()
        workers.start(killed)
        assert workers.outcome(0, 20) is None


def another_tag(is_any):
    group = dist.new_group()
    if dist.get_rank() == 0:
        group.send(np.ones(4), 1, tag=1)
        dist.destroy_process_group(group)
        return
    words = "a message with tag 1 is waiting to be received"
    fails(dist.DistBackendError, lambda: group.recv(np.ones(4), None if is_any else 0, tag=2), words)


@pytest.mark.parametrize("is_any", [False, True])
def test_the_tag_of_a_message_that_no_receive_takes_is_named_as_its_sender_leaves(world_of_2, is_any):
    world_of_2.run(another_tag, is_any)
