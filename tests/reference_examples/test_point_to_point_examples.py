"""The documented examples of messages between two ranks, one by one and in a batch."""

import numpy as np
import pytest
from documented import check, place

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


def ring():
    rank, size = place()
    send_tensor = np.arange(2, dtype=np.float32) + 2 * rank
    recv_tensor = np.random.default_rng(rank).standard_normal(2, np.float32)
    send_op = dist.P2POp(dist.isend, send_tensor, (rank + 1) % size)
    recv_op = dist.P2POp(dist.irecv, recv_tensor, (rank - 1 + size) % size)
    for request in dist.batch_isend_irecv([send_op, recv_op]):
        request.wait()
    return recv_tensor.tolist()


def test_batch_around_the_ring(initialised):
    size = initialised.size
    before = [(rank - 1) % size for rank in range(size)]
    check(initialised, ring, [[2.0 * rank, 2.0 * rank + 1] for rank in before], {2: [[2, 3], [0, 1]]})


def one_by_one():
    rank, size = place()
    if rank == 0:
        for dst in range(1, size):
            dist.send(np.array([10 * dst]), dst, tag=dst)
        return None
    tensor = np.zeros(1, np.int64)
    return dist.recv(tensor, src=0, tag=rank), tensor.item()


def test_send_and_recv(initialised):
    check(initialised, one_by_one, [None, *[(0, 10 * rank) for rank in range(1, initialised.size)]])


def from_anyone():
    rank, size = place()
    if rank != 0:
        dist.send(np.array([rank]), dst=0)
        return None
    tensor, pairs = np.zeros(1, np.int64), []
    for _ in range(size - 1):
        sender = dist.recv(tensor)  # no source given: whoever is first
        pairs.append((sender, tensor.item()))
    return sorted(pairs)


def test_recv_without_source_returns_the_sender(initialised):
    size = initialised.size
    check(initialised, from_anyone, [[(rank, rank) for rank in range(1, size)], *[None] * (size - 1)])


def requests():
    rank, size = place()
    tensor = np.zeros(1, np.int64)
    given = dist.isend(np.array([rank]), (rank + 1) % size)
    taken = dist.irecv(tensor, (rank - 1) % size)
    given.wait()
    taken.wait()
    return given.is_completed(), taken.is_completed(), taken.source_rank(), tensor.item()


def test_requests_are_completed_once_waited_for(initialised):
    size = initialised.size
    expected = [(True, True, (rank - 1) % size, (rank - 1) % size) for rank in range(size)]
    check(initialised, requests, expected)


def to_oneself():
    rank, _ = place()
    with pytest.raises(ValueError, match="dst is this rank"):
        dist.send(np.zeros(1), rank)


def test_nobody_sends_to_oneself(initialised):
    initialised.run(to_oneself)


def outside_of_the_group():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return None
    with pytest.warns(UserWarning, match="not in"):
        return dist.recv(np.zeros(1), src=0, group=group)


def test_recv_outside_of_the_group_returns_minus_one(initialised):
    check(initialised, outside_of_the_group, [None, *[-1] * (initialised.size - 1)])
