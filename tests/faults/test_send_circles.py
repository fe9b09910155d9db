"""Circles of sends over shared memory, where a rank that waits in a recv reads other messages of its source as well."""

from __future__ import annotations

import re
import sys
import threading

import numpy as np
import pytest
from trying import attempt, outcomes_of

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
LONG = 100_000
# Longer than it takes to prove a circle.
LATE_S = 2.5


def send_around(ranks):
    return attempt(lambda: dist.send(np.ones(LONG), dst=ranks[(ranks.index(dist.get_rank()) + 1) % len(ranks)]))


def two_and_three():
    dist.barrier()
    return send_around([0, 1] if dist.get_rank() < 2 else [2, 3, 4])


def beside_a_collective(pair):
    if dist.get_rank() == 0:
        return attempt(lambda: dist.send(np.ones(LONG), dst=1))
    return attempt(pair.barrier)


def around_receives():
    """Rank 2 sends to rank 3, which receives from rank 4, which receives from rank 2."""
    rank = dist.get_rank()
    if rank == 2:
        return attempt(lambda: dist.send(np.ones(LONG), dst=3))
    return attempt(lambda: dist.recv(np.ones(1), src=4 if rank == 3 else 2))


def unread():
    pair = dist.new_group([0, 1], group_desc="pair")
    if dist.get_rank() < 2:
        pair.barrier()
    dist.barrier()
    return beside_a_collective(pair) if dist.get_rank() < 2 else around_receives()


def read_meanwhile():
    """The long message is read by the recv of another one, so the ranks wait for each other only in their receives."""
    rank, x = dist.get_rank(), np.ones(1)
    dist.barrier()
    if rank == 0:
        dist.send(np.ones(LONG), dst=1, tag=7)
    return attempt(lambda: dist.recv(x, src=1 - rank, tag=3))


def from_anyone(group=None, *, probes=False):
    """The message has another tag than the wait of rank 0, and rank 1 makes the next call."""
    dist.barrier()
    if dist.get_rank() == 0:
        return attempt(lambda: dist.probe(group=group) if probes else dist.recv(np.ones(1), group=group))
    dist.send(np.ones(1), dst=0, tag=5)
    return attempt(dist.barrier)


def probe_from_anyone():
    return from_anyone(probes=True)


def long_message_for_anyone():
    """Rank 0 reads the long message of the other while it waits for another, so that only the receives are a circle."""
    rank, x = dist.get_rank(), np.ones(1)
    dist.barrier()
    if rank == 1:
        dist.send(np.ones(LONG), dst=0, tag=7)
    return attempt(lambda: dist.recv(x, tag=3))


def one_of_two_sends():
    """Two ranks wait for each other, but the third sends at last."""
    rank, x = dist.get_rank(), np.ones(1)
    dist.barrier()
    if rank == 0:
        source = dist.recv(x)
        dist.send(x, dst=1)
        return source
    if rank == 1:
        return dist.recv(x, src=0)
    threading.Event().wait(LATE_S)
    dist.send(x, dst=0)
    return 0


def long_objects_both_ways():
    """Send long objects both ways, of a kind that was sent before, so that the core sends them."""
    rank, objects = dist.get_rank(), [bytes(300_000)]
    for _ in range(4):
        if rank == 0:
            dist.send_object_list(objects, dst=1)
        else:
            dist.recv_object_list([None], src=0)
    for _ in range(4):
        if rank == 1:
            dist.send_object_list(objects, dst=0)
        else:
            dist.recv_object_list([None], src=1)
    return attempt(lambda: dist.send_object_list(objects, dst=1 - rank))


def steps(failure):
    assert failure.kind is dist.DistBackendError, failure
    return re.findall(r"rank (\d) waits for rank (\d) in (\w+)", failure.message)


def test_sends_in_a_circle_are_proven(new_workers):
    workers = new_workers(5, timeout_s=300.0)
    workers.start(two_and_three)
    failures = [workers.outcome(rank) for rank in range(5)]
    two = [("0", "1", "send"), ("1", "0", "send")]
    three = [("2", "3", "send"), ("3", "4", "send"), ("4", "2", "send")]
    assert list(map(steps, failures)) == [two] * 2 + [three] * 3
    assert all(failure.message.endswith("or call sendrecv, which does both at once") for failure in failures)


def test_long_objects_both_ways_are_proven(new_workers):
    workers = new_workers(2, timeout_s=300.0)
    workers.start(long_objects_both_ways)
    circle = [("0", "1", "send_object_list"), ("1", "0", "send_object_list")]
    assert [steps(workers.outcome(rank)) for rank in range(2)] == [circle] * 2


@pytest.mark.slow
def test_a_send_waits_for_a_rank_that_does_not_read_meanwhile(new_workers):
    workers = new_workers(5, timeout_s=300.0)
    workers.start(unread)
    failures = [workers.outcome(rank) for rank in range(5)]
    two = [("0", "1", "send"), ("1", "0", "barrier")]
    three = [("2", "3", "send"), ("3", "4", "recv"), ("4", "2", "recv")]
    assert list(map(steps, failures)) == [two] * 2 + [three] * 3


def test_a_send_that_the_other_reads_meanwhile_is_in_no_circle(new_workers):
    workers = new_workers(2, timeout_s=300.0)
    workers.start(read_meanwhile)
    for failure in (workers.outcome(0), workers.outcome(1)):
        assert steps(failure) == [("0", "1", "recv"), ("1", "0", "recv")]
        assert "tag=3), message 1 on 'world', at test_send_circles.py" in failure.message
        assert " (a message with tag 7 is waiting to be received)\n" in failure.message
        assert "\n  let rank 1 receive the message that is waiting, with its tag and source; or " in failure.message


over_tcp = [pytest.param(name, marks=pytest.mark.slow) for name in ("gloo-tcp", "gloo-hosts")]


@pytest.mark.parametrize("backend", ["threads", "gloo", *over_tcp])
@pytest.mark.parametrize("program", [from_anyone, probe_from_anyone])
def test_the_only_other_rank_is_any_source(new_workers, backend, program):
    for failure in outcomes_of(new_workers, program, 2, backend):
        call = "recv" if program is from_anyone else "probe"
        assert steps(failure) == [("0", "1", call), ("1", "0", "barrier")]
        assert "(a message with tag 5 is waiting to be received)" in failure.message


@pytest.mark.parametrize("backend", ["threads", "gloo", *over_tcp])
def test_a_receive_from_the_only_other_rank_reads_its_long_message_meanwhile(new_workers, backend):
    for failure in outcomes_of(new_workers, long_message_for_anyone, 2, backend):
        assert steps(failure) == [("0", "1", "recv"), ("1", "0", "recv")]


@pytest.mark.parametrize("backend", ["threads", "gloo", *over_tcp])
def test_a_receive_from_any_of_two_waits_for_the_one_that_may_send(new_workers, backend):
    assert outcomes_of(new_workers, one_of_two_sends, 3, backend) == [2, 0, 0]


def shift_by_different_numbers():
    mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("x",))
    told = attempt(lambda: mesh.shift(np.ones(1), by=1 + mesh.get_rank() % 2))
    if mesh.get_rank() == 0:  # it has what it waits for, and is there until the others have failed
        attempt(dist.barrier)
    return told


@pytest.mark.parametrize("backend", ["threads", "gloo", *over_tcp])
def test_shifts_that_disagree_are_named_and_told_on_what(new_workers, backend):
    _, *failures = outcomes_of(new_workers, shift_by_different_numbers, 3, backend)
    for failure in failures:
        assert failure.message.startswith("shift on group 'world'"), failure
        assert steps(failure) == [("1", "2", "shift"), ("2", "1", "shift")]
        assert failure.message.endswith("all ranks along the axis must call shift, with equal by, periodic and tag")
