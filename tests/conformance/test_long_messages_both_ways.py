"""Two ranks send each other long messages at once, by isend and irecv: in every order, from threads, with faults.

Each rank copies what it receives while it waits, so nothing depends on the order of calls and waits.
"""

import gc
import itertools
import os
import signal
import threading

import cases
import numpy as np
import pytest
from failing import fails
from worlds import WorkerSet, needs_linux

import meshdist as dist

pytestmark = [pytest.mark.timeout(120), needs_linux]
MIB = 1 << 20
SIZES = ((64 << 10) + 1, MIB, MIB + 1, 2 * MIB, 5 * MIB + 3)  # through the ring, whole or not, and between the arrays


@pytest.fixture(params=["gloo", "gloo-slots"])
def world_of_2(worlds, request):
    return worlds.world(request.param, 2)


def arrays(num_bytes, number=0):
    rank = dist.get_rank()
    given, taken = (np.empty(num_bytes, np.uint8) for _ in range(2))
    given[:], taken[:] = 1 + rank + number, 0
    return given, taken, 1 - rank


def arrived(taken, number=0):
    found, expected = {int(taken.min()), int(taken.max())}, {2 - dist.get_rank() + number}
    cases.same(found, expected, f"message {number} of {taken.size} bytes")


def in_every_order(num_bytes):
    for number, (sends_first, waits_for_send_first) in enumerate(itertools.product((False, True), repeat=2)):
        given, taken, peer = arrays(num_bytes, number)
        if sends_first:
            sending, receiving = dist.isend(given, peer), dist.irecv(taken, peer)
        else:
            receiving, sending = dist.irecv(taken, peer), dist.isend(given, peer)
        for work in (sending, receiving) if waits_for_send_first else (receiving, sending):
            work.wait()
        arrived(taken, number)
    dist.sendrecv(given, taken, peer)
    arrived(taken, number)


def again_and_again(num_bytes):
    """More often than the ranks try both ways before they take the faster one, and then try them again."""
    peer = 1 - dist.get_rank()
    given, taken = (np.zeros(num_bytes, np.uint8) for _ in range(2))
    for number in range(300):
        given[:] = (number + dist.get_rank()) % 256
        if number % 2:
            receiving = dist.irecv(taken, peer)
            dist.isend(given, peer).wait()
            receiving.wait()
        else:
            dist.sendrecv(given, taken, peer, peer)
        assert {int(taken.min()), int(taken.max())} == {(number + peer) % 256}


@pytest.mark.parametrize("num_bytes", [(64 << 10) + 1, 128 << 10, 600 << 10, MIB])
def test_repeated_messages_arrive_in_whichever_way(world_of_2, num_bytes):
    world_of_2.run(again_and_again, num_bytes)


def several_outstanding(num_bytes):
    rooms = [np.zeros(num_bytes, np.uint8) for _ in range(3)]
    given, _, peer = arrays(num_bytes)
    works = [work for room in rooms for work in (dist.isend(given, peer), dist.irecv(room, peer))]
    for work in reversed(works):
        work.wait()
    for room in rooms:
        arrived(room)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_several_at_once(world_of_2, num_bytes):
    world_of_2.run(several_outstanding, num_bytes)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_in_every_order(world_of_2, num_bytes):
    world_of_2.run(in_every_order, num_bytes)


def waits_of_two_threads(num_bytes):
    for number in range(5):
        given, taken, peer = arrays(num_bytes, number)
        receiving, sending = dist.irecv(taken, peer), dist.isend(given, peer)
        threads = [threading.Thread(target=work.wait) for work in (receiving, sending, receiving)]
        for thread in threads:
            thread.start()
        sending.wait()
        receiving.wait()
        arrived(taken, number)
        for thread in threads:
            thread.join()


def test_several_threads_wait_for_one_exchange(world_of_2):
    world_of_2.run(waits_of_two_threads, 2 * MIB)


def carried_by_the_progress_thread(num_bytes):
    for number in range(5):
        given, taken, peer = arrays(num_bytes, number)
        receiving, sending = dist.irecv(taken, peer), dist.isend(given, peer)
        future = receiving.get_future()  # its callback is for the progress thread, which meets the thread that waits
        sending.wait()
        future.wait()
        arrived(taken, number)


def test_a_callback_and_a_wait_meet(world_of_2):
    world_of_2.run(carried_by_the_progress_thread, 2 * MIB)


def dropped_works(num_bytes):
    given, taken, peer = arrays(num_bytes)
    dist.isend(given, peer)
    del given
    gc.collect()
    dist.recv(taken, peer)
    arrived(taken)
    dist.barrier()


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_message_whose_work_is_dropped_arrives(world_of_2, num_bytes):
    world_of_2.run(dropped_works, num_bytes)


def abort_what_is_posted(num_bytes):
    group = dist.new_group()
    given, taken, peer = arrays(num_bytes)
    receiving = group.irecv(taken, peer)
    group.barrier()
    if dist.get_rank() == 0:
        group.isend(given, peer, tag=7)  # rank 1 may take it while it waits for the other one
        group.abort("enough")
    fails(dist.DistBackendError, receiving.wait, "enough")
    dist.barrier()
    taken[:] = 0  # nobody writes into it any more
    dist.barrier()
    assert not taken.any()


def test_posted_messages_end_when_the_group_is_aborted(worlds):
    worlds.world("gloo", 2).run(abort_what_is_posted, 2 * MIB)


def announce_and_die(num_bytes):
    given, taken, peer = arrays(num_bytes)
    dist.barrier()
    dist.sendrecv(given, taken, peer)
    if dist.get_rank() == 1:
        dist.isend(given, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def exchange():  # its calls fail at once where the end is noticed before they begin
        works = [dist.isend(given, peer), dist.irecv(taken, peer), dist.irecv(taken, peer)]
        for work in works:
            work.wait()

    fails(dist.DistBackendError, exchange, "rank 1")


def test_a_peer_that_dies_after_it_has_announced_a_message(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(announce_and_die, 2 * MIB)
        assert workers.outcome(0, 20) is None
