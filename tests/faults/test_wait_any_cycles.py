"""Ranks that wait for each other where one is in a wait_any: all raise, unless one of those that it awaits may act."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from cycles import BACKENDS, LATE_S, Cycle, check, later
from trying import attempt, outcomes_of, start

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
LONG = 300_000


def wait_for_any(works):
    works[dist.wait_any(works)].wait()


def irecvs(sources, *tags):
    return [dist.irecv(np.ones(4), source, tag=tag) for source in sources for tag in tags or [0]]


def others():
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def of_both_neighbours():
    works = irecvs(others())
    return attempt(lambda: wait_for_any(works))


def of_two_from_any_rank():
    works = irecvs([None], 1, 2)
    return attempt(lambda: wait_for_any(works))


def of_two_tags():
    works = irecvs(others(), 1, 2)
    return attempt(lambda: wait_for_any(works))


def on_one_rank():
    works = irecvs(others() if dist.get_rank() == 0 else [0], 0)
    return attempt(lambda: wait_for_any(works) if dist.get_rank() == 0 else works[0].wait())


def of_an_isend_as_well():
    """Over shared memory, no rank reads what the rank before sends."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        return attempt(lambda: dist.recv(np.ones(4), (rank + 1) % size if rank == 1 else 0))
    works = [dist.irecv(np.ones(4), 2), dist.isend(np.ones(LONG), 1)]
    return attempt(lambda: wait_for_any(works))


def of_a_collective_as_well():
    pair = dist.new_group(group_desc="pair")
    if dist.get_rank() == 1:
        return attempt(dist.barrier)
    works = [pair.all_reduce(np.ones(4), async_op=True), dist.irecv(np.ones(4), 1)]
    return attempt(lambda: wait_for_any(works))


CYCLES = {
    of_both_neighbours: Cycle(("irecv",) * 3, ("1, 2", "0, 2", "0, 1")),
    of_two_from_any_rank: Cycle(("irecv",) * 3, ("1, 2", "0, 2", "0, 1")),
    of_two_tags: Cycle(("irecv",) * 2, ("1", "0")),
    on_one_rank: Cycle(("irecv",) * 3, ("1, 2", "0", "0")),
    of_an_isend_as_well: Cycle(("irecv", "recv", "recv"), ("1, 2", "2", "0")),
    of_a_collective_as_well: Cycle(("all_reduce", "barrier"), ("1", "0")),
}
QUICK = {of_both_neighbours}
PROGRAMS = [program if program in QUICK else pytest.param(program, marks=pytest.mark.slow) for program in CYCLES]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_rank_raises_that_waits_for_any_in_a_cycle(new_workers, program, backend):
    cycle = CYCLES[program]
    failures = outcomes_of(new_workers, program, len(cycle.calls), backend)
    check(failures, cycle)
    if program in (of_both_neighbours, of_two_tags):
        assert all(failure.message.count(", in a wait_any with 1 other call") == len(failures) for failure in failures)


def one_computes(group, rank):
    """Rank 0 waits for any of the others, of which one waits for it and one sends at last."""
    x = np.ones(1)
    if rank == 1:
        return group.recv(x, 0)
    if rank == 2:
        later()
        group.send(x, 0)
        return 0
    works = [group.irecv(np.ones(1), source) for source in (1, 2)]
    found = dist.wait_any(works)
    group.send(x, 1)
    return found - 1


def it_has_a_timeout(group, rank):
    """Rank 0 waits for some seconds only, and then sends what the others wait for."""
    if rank:
        group.recv(np.ones(1), 0)
        group.send(np.ones(1), 0)
        return 0
    works = [group.irecv(np.ones(1), source) for source in (1, 2)]
    with pytest.raises(dist.DistTimeoutError):
        dist.wait_any(works, LATE_S)
    for source in (1, 2):
        group.send(np.ones(1), source)
    for work in works:
        work.wait()
    return 0


def it_is_in_a_thread(group, rank):
    """The thread that waits is another one than that which sends."""
    if rank:
        group.recv(np.ones(1), 0)
        group.send(np.ones(1), 0)
        return 0
    works = [group.irecv(np.ones(1), source) for source in (1, 2)]
    thread = threading.Thread(target=dist.wait_any, args=(works,))
    thread.start()
    later()
    for source in (1, 2):
        group.send(np.ones(1), source)
    thread.join()
    for work in works:
        work.wait()
    return 0


def another_call_has_a_callback(group, rank):
    """A callback of a call that rank 0 does not wait for sends what rank 1 waits for."""
    x = np.ones(1)
    if rank == 2:
        later()
        group.send(x, 0, tag=3)
        return 0
    if rank == 1:
        group.recv(x, 0)
        group.send(x, 0)
        group.recv(x, 0)
        group.send(x, 0, tag=1)
        return 0
    works = [group.irecv(np.ones(1), 1), group.irecv(np.ones(1), 1, tag=1)]
    other = group.irecv(np.ones(1), 2, tag=3)
    other.get_future().add_done_callback(lambda future: group.isend(x, 1))
    found = dist.wait_any(works)
    group.send(x, 1)
    works[1].wait()
    return found


PROGRAMS_THAT_GO_ON = [one_computes, it_has_a_timeout, it_is_in_a_thread, another_call_has_a_callback]


def goes_on(program):
    group = dist.new_group()  # threads of a rank that is a thread know no other
    result = program(group, dist.get_rank())
    group.barrier()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_as_long_as_one_may_act_no_rank_raises(new_workers, backend):
    # Each program has a world of its own, so that all are late at the same time.
    worlds = [start(new_workers, goes_on, 3, backend, program) for program in PROGRAMS_THAT_GO_ON]
    assert [outcomes() for outcomes in worlds] == [[0, 0, 0]] * len(worlds)
