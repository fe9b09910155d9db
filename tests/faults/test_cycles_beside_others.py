"""Ranks that wait for each other while other calls of theirs are in progress: all raise, unless those end a wait."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cycles import BACKENDS, Cycle, check, later
from trying import attempt, outcomes_of

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
LONG = 300_000


def neighbours():
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


def wait_for(works):
    return [work.wait() for work in works]


def one_after_another():
    before, after = neighbours()
    works = [dist.irecv(np.ones(4), before), dist.irecv(np.ones(4), after, tag=1)]
    return attempt(lambda: wait_for(works))


def second_of_two():
    """Two of the same source and tag, of which only the first gets a message."""
    before, after = neighbours()
    works = [dist.irecv(np.ones(4), before) for _ in range(2)]
    dist.send(np.ones(4), after)
    return attempt(lambda: wait_for(works))


def behind_the_first():
    """None of the two gets a message, and the second is waited for: that fails since the first does."""
    before, _ = neighbours()
    works = [dist.irecv(np.ones(4), before) for _ in range(2)]
    assert "after an earlier failure: deadlock: " in attempt(works[1].wait).message
    return attempt(works[0].wait)


def recv_beside_an_irecv():
    before, after = neighbours()
    work = dist.irecv(np.ones(4), after, tag=1)
    return attempt(lambda: (dist.recv(np.ones(4), before), work.wait()))


def barrier_beside_irecvs():
    """As the receives are of a known kind, they may not be posted yet."""
    before, after = neighbours()
    for _ in range(3):
        work = dist.irecv(np.ones(4), before)
        dist.send(np.ones(4), after)
        work.wait()
    work = dist.irecv(np.ones(4), before)
    call = dist.barrier if dist.get_rank() == 0 else lambda: dist.recv(np.ones(4), 0, tag=5)
    return attempt(lambda: (call(), work.wait()))


def recv_beside_an_unread_isend():
    """The message is too long for the memory that the ranks share."""
    if dist.get_rank() == 0:
        work = dist.isend(np.ones(2_000_000), 1)
        return attempt(lambda: (dist.recv(np.ones(4), 1, tag=5), work.wait()))
    return attempt(dist.barrier)


def halo_exchange_with_wrong_tags():
    before, after = neighbours()
    works = [dist.irecv(np.ones(LONG), before, tag=1), dist.irecv(np.ones(LONG), after, tag=2)]
    works += [dist.isend(np.ones(LONG), after, tag=3), dist.isend(np.ones(LONG), before, tag=4)]
    return attempt(lambda: wait_for(works))


def collectives_in_opposite_orders():
    ranks = range(dist.get_world_size())
    groups = [dist.new_group(ranks, group_desc=name) for name in ("rows", "columns")]
    for group in reversed(groups) if dist.get_rank() == 0 else groups:
        attempted = attempt(lambda group=group: group.all_reduce(np.ones(4), async_op=True).wait())
        if attempted.kind:
            break
    return attempted


def several_collectives_in_opposite_orders():
    ranks = range(dist.get_world_size())
    groups = [dist.new_group(ranks, group_desc=name) for name in ("rows", "columns")]
    group = groups[int(dist.get_rank() == 0)]
    works = [group.all_reduce(np.ones(n), async_op=True) for n in (4, 100_000, 7)]
    return attempt(lambda: wait_for(works))


RING = ("2", "0", "1")
CYCLES = {
    one_after_another: Cycle(("irecv",) * 3, RING),
    second_of_two: Cycle(("irecv",) * 3, RING),
    behind_the_first: Cycle(("irecv",) * 3, RING),
    recv_beside_an_irecv: Cycle(("recv",) * 3, RING),
    barrier_beside_irecvs: Cycle(("barrier", "recv"), ("1", "0")),
    recv_beside_an_unread_isend: Cycle(("recv", "barrier"), ("1", "0")),
    halo_exchange_with_wrong_tags: Cycle(("irecv",) * 3, RING),
    collectives_in_opposite_orders: Cycle(("all_reduce",) * 2, ("1", "0")),
    several_collectives_in_opposite_orders: Cycle(("all_reduce",) * 2, ("1", "0")),
}
QUICK = {one_after_another, barrier_beside_irecvs, several_collectives_in_opposite_orders}
PROGRAMS = [program if program in QUICK else pytest.param(program, marks=pytest.mark.slow) for program in CYCLES]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_rank_of_a_cycle_raises_beside_its_other_calls(new_workers, program, backend):
    cycle = CYCLES[program]
    check(outcomes_of(new_workers, program, len(cycle.calls), backend), cycle)


def an_irecv_takes_the_message(group, rank):
    """Rank 0 takes the long message of rank 1 while it waits for it in a barrier."""
    x = np.ones(LONG)
    if rank == 1:
        later()
        group.isend(x, 0).wait()
        group.barrier()
        return
    work = group.irecv(x, 1)
    group.barrier()
    work.wait()


def an_irecv_takes_the_message_behind_others(group, rank):
    """The receive of rank 0 takes a message only after another one has come."""
    x, y = np.ones(LONG), np.ones(1)
    if rank == 1:
        later()
        group.isend(x, 0, tag=3)
        group.isend(x, 0, tag=2).wait()
        group.send(y, 0)
        group.isend(x, 0, tag=3).wait()
        return
    works = [group.irecv(x, 1, tag=2), group.irecv(np.ones(LONG), 1, tag=3)]
    group.irecv(y, 1).wait()
    wait_for([*works, group.irecv(x, 1, tag=3)])


def programs_that_go_on():
    group = dist.new_group()  # threads of a rank that is a thread know no other
    for program in (an_irecv_takes_the_message, an_irecv_takes_the_message_behind_others):
        program(group, dist.get_rank())
        group.barrier()
    return "done"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_as_long_as_another_call_ends_a_wait_no_rank_raises(new_workers, backend):
    assert outcomes_of(new_workers, programs_that_go_on, 2, backend) == ["done"] * 2
