"""Long messages both ways, of kinds that were sent before: announced by the core, copied by their receivers."""

import gc
import os
import signal

import numpy as np
import pytest
from failing import fails
from worlds import WorkerSet, needs_linux

import meshdist as dist
from meshdist import core
from meshdist.groups.unposted_messages import AnnouncedWork

pytestmark = [
    pytest.mark.timeout(60),
    needs_linux,
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]

MIB = 1 << 20


class Exchange:
    """Arrays of one kind of message, which this rank and the other one have exchanged before."""

    def __init__(self, num_bytes, group=None):
        self.group = dist.new_group() if group is None else group
        self.rank, self.peer = self.group.rank(), 1 - self.group.rank()
        self.given, self.taken = (np.zeros(num_bytes, np.uint8) for _ in range(2))
        self.number = 0
        for _ in range(4):
            for work in self.begin():
                work.wait()
            self.check()

    def begin(self, *, sends_first=False):
        self.number += 1
        self.given[:] = 2 * self.number + self.rank
        if sends_first:
            sending = self.group.isend(self.given, self.peer)
            return self.group.irecv(self.taken, self.peer), sending
        return self.group.irecv(self.taken, self.peer), self.group.isend(self.given, self.peer)

    def check(self):
        assert (self.taken == 2 * self.number + self.peer).all()


def exchange_in_both_orders(num_bytes, times):
    exchange, announced = Exchange(num_bytes), 0
    for turn in range(times):
        receiving, sending = exchange.begin()
        announced += isinstance(sending, AnnouncedWork)
        for work in (receiving, sending) if turn % 2 else (sending, receiving):
            assert work.wait()
        assert sending.is_success()
        exchange.check()
    return announced


@pytest.mark.parametrize("num_bytes", [MIB + 1, 4 * MIB])
def test_messages_both_ways_are_announced(worlds, num_bytes):
    # Not those before which the progress thread has posted the receive.
    assert all(worlds.world("gloo", 2).run(exchange_in_both_orders, num_bytes, 12))


def send_first(num_bytes, times):
    exchange, announced = Exchange(num_bytes), 0
    for turn in range(times):
        receiving, sending = exchange.begin(sends_first=True)
        announced += isinstance(sending, AnnouncedWork)
        for work in (receiving, sending) if turn % 2 else (sending, receiving):
            work.wait()
        exchange.check()
    return announced


def test_a_long_message_is_announced_before_anything_is_received(worlds):
    assert worlds.world("gloo", 2).run(send_first, 2 * MIB, 12) == [12, 12]


def test_what_has_room_is_written_before_anything_is_received(worlds):
    assert worlds.world("gloo", 2).run(send_first, MIB // 4, 12) == [0, 0]


def send_alone(num_bytes, times):
    """Only rank 0 sends, and waits for that alone; then both do."""
    exchange, announced = Exchange(num_bytes), []
    if exchange.rank == 0:
        for number in range(times):
            exchange.given[:] = number
            sending = exchange.group.isend(exchange.given, 1)
            announced.append(isinstance(sending, AnnouncedWork))
            sending.wait()
    else:
        for number in range(times):
            exchange.group.recv(exchange.taken, 0)
            assert (exchange.taken == number).all()
    for _ in range(3):
        for work in exchange.begin(sends_first=True):
            work.wait()
        exchange.check()
    return [number for number, is_announced in enumerate(announced) if is_announced]


def test_a_rank_that_waits_for_a_send_alone_copies_as_well(worlds):
    # The first two of them show it; later, another one is tried.
    assert worlds.world("gloo", 2).run(send_alone, 2 * MIB, 100) == [[0, 1, 65], []]


def exchange_around(num_bytes):
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [(rank - 1) % size, (rank + 1) % size]
    for number in range(6):
        taken = {peer: np.zeros(num_bytes, np.uint8) for peer in peers}
        receiving = [dist.irecv(taken[peer], peer) for peer in peers]
        sending = [dist.isend(np.full(num_bytes, 10 * number + rank, np.uint8), peer) for peer in peers]
        for work in (*sending, *receiving):
            work.wait()
        for peer in peers:
            assert (taken[peer] == 10 * number + peer).all()


def test_neighbours_of_a_ring_exchange(worlds):
    worlds.world("gloo", 3).run(exchange_around, MIB + 64)


def ask_in_other_ways(num_bytes):
    """Ask for the send by other means than `wait`, before the peer receives."""
    exchange = Exchange(num_bytes)
    begun = np.zeros(1)
    if exchange.rank == 1:
        dist.recv(begun, 0)
    receiving, sending = exchange.begin()
    if exchange.rank == 0:
        future = sending.get_future()
        assert not sending.is_completed()
        fails(dist.DistTimeoutError, lambda: sending.wait(timeout=0.02), "call wait() again")
        dist.send(begun, 1)
        assert future.wait() == []
    receiving.wait()
    sending.wait()
    exchange.check()


def test_a_send_is_asked_for_in_every_way(worlds):
    worlds.world("gloo", 2).run(ask_in_other_ways, 2 * MIB)


def drop_what_is_announced(num_bytes):
    exchange = Exchange(num_bytes)
    receiving = exchange.begin()[0]
    gc.collect()
    if exchange.rank == 0:
        receiving.wait()
        exchange.check()
    dist.destroy_process_group(exchange.group)  # waits for the messages
    exchange.check()
    return receiving.is_success()


def test_a_group_ends_after_its_announced_messages(worlds):
    assert worlds.world("gloo", 2).run(drop_what_is_announced, 2 * MIB) == [True, True]


def abort_the_exchange(num_bytes):
    exchange = Exchange(num_bytes)
    if exchange.rank == 0:
        works = exchange.begin()
        exchange.group.abort("enough")
        for work in works:
            fails(dist.DistBackendError, work.wait, "enough")
    dist.barrier()


def test_announced_messages_end_when_the_group_is_aborted(worlds):
    worlds.world("gloo", 2).run(abort_the_exchange, 2 * MIB)


def die_before_the_copy(num_bytes):
    exchange = Exchange(num_bytes, dist.group.WORLD)
    dist.barrier()
    if exchange.rank == 1:
        exchange.begin()
        os.kill(os.getpid(), signal.SIGKILL)
    fails(dist.DistBackendError, lambda: [work.wait() for _ in range(2) for work in exchange.begin()], "rank 1")


def test_a_peer_dies_after_it_has_announced_a_message(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(die_before_the_copy, 2 * MIB)
        assert workers.outcome(0, 20) is None
