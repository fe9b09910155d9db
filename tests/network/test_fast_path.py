"""The fast path of small messages between hosts: mixed with other messages, and when a peer ends."""

import os
import re
import signal

import numpy as np
import pytest
from worlds import report

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
NUM_BYTES = [8, 4096, 4104]


def exchange(group, x, times=3):
    """Rank 0 sends first."""
    for number in range(times):
        if dist.get_rank() == 0:
            group.send(np.full_like(x, number), 1)
            group.recv(x, 1)
        else:
            group.recv(x, 0)
            group.send(x, 0)
        assert (x == number).all(), (x, number)


def asked_for_before(num_bytes):
    """A receipt that was posted first gets the message that came first."""
    x, first, second = (np.zeros(num_bytes // 8) for _ in range(3))
    exchange(dist.group.WORLD, x)
    if dist.get_rank() == 0:
        work = dist.irecv(first, 1)
        dist.send(x, 1)
        dist.recv(second, 1)
        work.wait()
    else:
        dist.recv(x, 0)
        for number in (1, 2):
            dist.send(np.full_like(x, number), 0)
    dist.barrier()
    return first[0], second[-1]


@pytest.mark.parametrize("num_bytes", NUM_BYTES)
def test_receipts_are_served_in_their_order(worlds, num_bytes):
    assert worlds.world("gloo-tcp", 2).run(asked_for_before, num_bytes) == [(1, 2), (0, 0)]


def others_come_first(num_bytes):
    """Of another tag, of another group, and a long one, which are asked for last."""
    group, x = dist.new_group(), np.zeros(num_bytes // 8)
    exchange(dist.group.WORLD, x)
    exchange(group, x)
    long, tagged, grouped = np.zeros(100_000), np.zeros_like(x), np.zeros_like(x)
    if dist.get_rank() == 0:
        work = dist.isend(np.full_like(long, 4), 1, tag=4)
        dist.send(np.full_like(x, 3), 1, tag=3)
        group.send(np.full_like(x, 2), 1)
        for _ in range(3):
            dist.send(np.full_like(x, 1), 1)
        work.wait()
    else:
        for _ in range(3):
            dist.recv(x, 0)
            assert (x == 1).all(), x
        group.recv(grouped, 0)
        dist.recv(tagged, 0, tag=3)
        dist.recv(long, 0, tag=4)
    dist.barrier()
    dist.destroy_process_group(group)
    return set(grouped) | set(tagged) | set(long)


@pytest.mark.parametrize("num_bytes", NUM_BYTES)
def test_what_nobody_asks_for_yet_is_kept(worlds, num_bytes):
    assert worlds.world("gloo-tcp", 2).run(others_come_first, num_bytes) == [{0.0}, {2.0, 3.0, 4.0}]


def misfit():
    group, x = dist.new_group(), np.zeros(1)
    exchange(group, x)
    if dist.get_rank() == 0:
        group.send(np.zeros(1, np.int64), 1)
    else:
        with pytest.raises(dist.DistBackendError, match=r"sent int64\[1\], but the receiving array is float64"):
            group.recv(x, 0)
    dist.barrier()
    dist.destroy_process_group(group)


def test_another_dtype_is_an_error(worlds):
    worlds.world("gloo-tcp", 2).run(misfit)


def for_ever(call, *args):
    while True:
        call(*args)


def one_leaves(num_bytes):
    group, x = dist.new_group(), np.zeros(num_bytes // 8)
    exchange(group, x)
    if dist.get_rank() == 1:
        group.send(np.full_like(x, 7), 0)
        dist.destroy_process_group(group)
        dist.barrier()
        return None
    group.recv(x, 1)
    assert (x == 7).all(), "what was sent before leaving is received"
    errors = []
    for call in (group.recv, group.send):
        with pytest.raises(dist.DistBackendError) as caught:
            for_ever(call, x, 1)  # nobody tells a sender at once
        errors.append(str(caught.value))
    dist.barrier()
    dist.destroy_process_group(group)
    return errors


@pytest.mark.parametrize("num_bytes", NUM_BYTES)
def test_the_end_of_the_other_side_is_told(worlds, num_bytes):
    errors, _ = worlds.world("gloo-tcp", 2).run(one_leaves, num_bytes)
    for error in errors:
        assert re.search("rank 1 .*has destroyed the group", error), error


def sends_until_the_other_is_killed():
    x = np.zeros(1)
    exchange(dist.group.WORLD, x)
    report("ready")
    with pytest.raises(dist.DistBackendError) as caught:
        for_ever(dist.send, x, 1)
    return str(caught.value)


def receives(times):
    x = np.zeros(1)
    exchange(dist.group.WORLD, x)
    for _ in range(times):
        dist.recv(x, 0)
    report("ready")


def test_who_sends_to_a_rank_that_dies_is_told(tcp_workers):
    workers = tcp_workers(2)
    workers.start(sends_until_the_other_is_killed, ranks=[0])
    workers.start(receives, 100, ranks=[1])
    assert workers.reported(0) == "ready"
    assert workers.reported(1) == "ready"
    os.kill(workers.pids[1], signal.SIGKILL)
    assert re.search("rank 1 .*(SIGKILL|has died)", workers.outcome(0))
