"""Long sends of kinds that were sent before: the core writes them through the ring, or announces them, and waits."""

import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
from failing import fails
from worlds import WorkerSet, needs_linux

import meshdist as dist

pytestmark = [pytest.mark.timeout(60), needs_linux]
MIB = 1 << 20
LONG, SMALL = 1, 2  # tags


def fill_and_send(array, number, **tag):
    array[:] = number % 256
    dist.send(array, 1 - dist.get_rank(), **tag)


def take(array, number, **tag):
    dist.recv(array, 1 - dist.get_rank(), **tag)
    assert {int(array.min()), int(array.max())} == {number % 256}


def there_and_back(num_bytes, times):
    """More often than both ways are tried before the faster one is taken, and then tried again."""
    array = np.zeros(num_bytes, np.uint8)
    for number in range(times):
        if dist.get_rank() == 0:
            fill_and_send(array, number)
            take(array, number + 1)
        else:
            take(array, number)
            fill_and_send(array, number + 1)


@pytest.mark.parametrize("num_bytes", [MIB + 1, 3 * MIB + 5, 4 * MIB])
def test_repeated_messages_arrive_in_whichever_way(worlds, num_bytes):
    worlds.world("gloo", 2).run(there_and_back, num_bytes, 270)


def some_of_each_way(num_bytes):
    """Make messages of this kind, from rank 0 to rank 1, known; the next ones are tried in both ways."""
    array = np.zeros(num_bytes, np.uint8)
    for number in range(5):
        (fill_and_send if dist.get_rank() == 0 else take)(array, number, tag=LONG)
    return array


def send_while_another_waits(num_bytes, times):
    """Another thread sends while a message is half written, to a receiver that takes the other one first."""
    array, small = some_of_each_way(num_bytes), np.zeros(3, np.uint8)
    for number in range(times):
        if dist.get_rank() == 0:
            thread = threading.Thread(target=fill_and_send, args=(array, number), kwargs={"tag": LONG})
            thread.start()
            fill_and_send(small, number, tag=SMALL)
            thread.join()
        else:
            take(small, number, tag=SMALL)
            take(array, number, tag=LONG)


def test_messages_of_other_threads_do_not_get_into_one_that_is_half_written(worlds):
    worlds.world("gloo", 2).run(send_while_another_waits, 3 * MIB, 30)


def both_send_after_they_post(num_bytes, times):
    given, taken = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    peer = 1 - dist.get_rank()
    for number in range(times):
        receiving = dist.irecv(taken, peer)
        fill_and_send(given, number + dist.get_rank())
        receiving.wait()
        assert {int(taken.min()), int(taken.max())} == {(number + peer) % 256}


@pytest.mark.parametrize("num_bytes", [MIB // 2, MIB + 1, 4 * MIB])
def test_ranks_that_have_posted_a_receive_send_to_each_other(worlds, num_bytes):
    worlds.world("gloo", 2).run(both_send_after_they_post, num_bytes, 40)


def around_the_ring(num_bytes, times):
    """A rank receives from one rank what it sends to another one, which has not begun to receive."""
    rank, size, array = dist.get_rank(), dist.get_world_size(), np.zeros(num_bytes, np.uint8)
    for number in range(times):
        if rank > 0:
            dist.recv(array, rank - 1)
            assert (array == number).all()
        array[:] = number
        dist.send(array, (rank + 1) % size)
        if rank == 0:
            dist.recv(array, size - 1)
            assert (array == number).all()


def test_messages_go_around_a_ring_of_ranks(worlds):
    worlds.world("gloo", 3).run(around_the_ring, 2 * MIB, 30)


def send_what_nobody_takes(num_bytes):
    group = dist.new_group(timeout=timedelta(seconds=1))
    array = np.zeros(num_bytes, np.uint8)
    for number in range(3):
        array[:] = number
        (group.send if group.rank() == 0 else group.recv)(array, 1 - group.rank())
    if group.rank() == 0:
        fails(dist.DistTimeoutError, lambda: group.send(array, 1), "rank 1")
    dist.barrier()


def test_a_message_that_nobody_takes_times_out(worlds):
    worlds.world("gloo", 2).run(send_what_nobody_takes, 2 * MIB)


def arrays_that_are_kept(num_bytes, times):
    """The receiver begins at another moment each time: before, while and after the sender writes what has room."""
    kept, rank = [], dist.get_rank()
    for number in range(times):
        array = np.full(num_bytes, number % 256, np.uint8)
        dist.barrier()
        if rank == 0:
            dist.send(array, 1)
            kept.append(weakref.ref(array))
        else:
            begin = time.perf_counter() + 20e-6 * number
            while time.perf_counter() < begin:
                pass
            take(array, number)
    del array
    return sum(reference() is not None for reference in kept)


def test_no_array_is_kept_after_it_is_sent(worlds):
    assert worlds.world("gloo", 2).run(arrays_that_are_kept, 2 * MIB, 100) == [0, 0]


def interrupt_a_send(num_bytes, after_s):
    group, array = dist.new_group(), np.zeros(num_bytes, np.uint8)
    for _ in range(3):
        (group.send if group.rank() == 0 else group.recv)(array, 1 - group.rank())

    def send():
        signal.setitimer(signal.ITIMER_REAL, after_s)
        group.send(array, 1)

    if group.rank() == 0:
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            fails(KeyboardInterrupt, send)
        finally:
            signal.signal(signal.SIGALRM, previous)
    dist.barrier()


@pytest.mark.parametrize("after_us", [100, 200, 300, 1000, 10_000])
def test_a_send_that_nobody_takes_is_interrupted(worlds, after_us):
    worlds.world("gloo", 2).run(interrupt_a_send, 2 * MIB, after_us * 1e-6)


def die_instead_of_taking_the_rest(num_bytes):
    array = some_of_each_way(num_bytes)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fails(dist.DistBackendError, lambda: [fill_and_send(array, number, tag=LONG) for number in range(20)], "rank 1")


def test_a_receiver_dies_before_it_takes_the_rest(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(die_instead_of_taking_the_rest, 2 * MIB)
        assert workers.outcome(0, 20) is None
