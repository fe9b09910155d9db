"""Calls of few bytes in which not all take data of all: a rank returns before those have come from whom it takes none.

So it does in longer ones, where ranks share cores. What the others do instead, or that they are gone, is told in one of
its next calls.
"""

import os
import re
import signal
import sys

import numpy as np
import pytest
from last_warnings import warnings_at_the_end
from trying import attempt
from until import loaded

import meshdist as dist
from meshdist.backends.gloo.shm.flag_barrier import AHEAD
from meshdist.backends.gloo.shm.shared_region import NUM_EARLY_SLOTS

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "gloo-slots"])
DETECTED_S = 1.0

# Each gives on the last rank, or takes there; in a scan, all others take from those before them.
ROOTED = {
    "broadcast": lambda group, x, last: group.broadcast(x, last),
    "reduce": lambda group, x, last: group.reduce(x, last),
    "gather": lambda group, x, last: group.gather(x, blocks_at(group, x, last), last),
    "scatter": lambda group, x, last: group.scatter(x, blocks_at(group, x, last), last),
    "scan": lambda group, x, last: group.scan(x),
}


def blocks_at(group, x, root):
    return [x.copy() for _ in range(group.size())] if group.rank() == root else None


def new_group_on_one_core(**options):
    """Return a group whose ranks believe to share a core."""
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        group = dist.new_group(**options)
        group.barrier()
    finally:
        os.sched_setaffinity(0, cores)
    return group


def givers_first(name, root_gives, is_long):
    """The ranks that give call, and then tell the others, which call only after that."""
    group, last = new_group_on_one_core() if is_long else dist.new_group(), dist.get_world_size() - 1
    group.barrier()
    num_calls, length = (NUM_EARLY_SLOTS - 1, 500) if is_long else (AHEAD, 3)
    givers = [last] if root_gives else [*range(last)]
    takers = [rank for rank in range(last + 1) if rank not in givers]
    is_giver = group.rank() in givers
    for giver in () if is_giver else givers:
        dist.recv(np.ones(1), giver)
    for _ in range(num_calls):
        ROOTED[name](group, np.ones(length), last)
    for taker in takers if is_giver else ():
        dist.send(np.ones(1), taker)


@pytest.mark.parametrize("is_long", [False, True], ids=["few bytes", "long"])
@pytest.mark.parametrize("name", ROOTED)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_give_return_before_the_others_have_called(worlds, size, name, is_long):
    worlds.world("gloo", size).run(givers_first, name, name in ("broadcast", "scatter"), is_long)


def gives_and_leaves():
    group = dist.new_group(group_desc="left")
    group.barrier()
    rank = dist.get_rank()
    x = np.full(3, rank + 1.0)
    if rank == 0:
        for other in range(1, dist.get_world_size()):
            dist.recv(np.ones(1), other)
    group.reduce(x, 0)
    dist.destroy_process_group(group)
    if rank > 0:
        dist.send(np.ones(1), 0)
    return x.tolist()


@BACKENDS
def test_what_was_given_is_there_though_the_rank_has_left_the_group(worlds, backend):
    assert worlds.world(backend, 3).run(gives_and_leaves)[0] == [6.0] * 3


def waits_for_one_when_another_has_left():
    group, rank = dist.new_group(group_desc="left", timeout=1.0), dist.get_rank()
    group.barrier()
    if rank == 1:
        dist.recv(np.ones(1), 2)
    if rank in (1, 3):
        return None
    if rank == 2:
        dist.recv(np.ones(1), 0)
    outcome = attempt(lambda: group.scan(np.ones(3)))
    if rank == 0:
        dist.destroy_process_group(group)
    dist.send(np.ones(1), {0: 2, 2: 1}[rank])
    return outcome


@pytest.mark.parametrize("size", [3, 4])
@BACKENDS
def test_a_rank_that_has_given_and_left_does_not_end_the_wait_for_another(worlds, backend, size):
    first, _, third, *_ = worlds.world(backend, size).run(waits_for_one_when_another_has_left)
    assert first.kind is None, first
    assert third.kind is dist.DistTimeoutError, third
    assert "rank 1" in third.message, third


FOLLOWING = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "async all_reduce": lambda group: group.all_reduce(np.ones(3), async_op=True).wait(),
    "barrier": lambda group: group.barrier(),
    "monitored_barrier": lambda group: (group.monitored_barrier(timeout=30), group.barrier()),
    "large broadcast": lambda group: group.broadcast(np.ones(1 << 20), 0),
    "large all_reduce": lambda group: group.all_reduce(np.ones(1 << 20)),
    "all_to_all": lambda group: group.all_to_all([*np.ones((3, 2))], [*np.ones((3, 2))]),
    "objects": lambda group: group.all_gather_object([None] * group.size(), "x"),
    "broadcasts": lambda group: [group.broadcast(np.ones(5), 0) for _ in range(AHEAD + 1)],
    "async broadcasts": lambda group: [group.broadcast(np.ones(5), 0, async_op=True).wait() for _ in range(AHEAD + 1)],
    "reduces": lambda group: [group.reduce(np.ones(5), 1) for _ in range(AHEAD + 1)],
    "scans": lambda group: [group.scan(np.ones(5)) for _ in range(AHEAD + 1)],
}


def different_broadcasts(group, length=3):
    group.broadcast(np.ones(length + min(group.rank(), 1)), min(group.rank(), 1))


FIRST_CALL = f"test_early_returns.py:{different_broadcasts.__code__.co_firstlineno + 1}"


def other_call_before(name, known, length):
    """Both ranks 0 and 1 give in another call than the other; all go on with the same one."""
    group = new_group_on_one_core(group_desc="at odds")
    for _ in range(3 if known else 1):
        for count in (length, length + 1):
            group.broadcast(np.ones(count), 0)
        FOLLOWING[name](group)
    first = attempt(lambda: different_broadcasts(group, length))
    return first, attempt(lambda: FOLLOWING[name](group)), attempt(group.barrier)


@pytest.mark.parametrize("length", [3, 500])
@pytest.mark.parametrize("known", [False, True], ids=["second calls", "known calls"])
@pytest.mark.parametrize("name", FOLLOWING)
@BACKENDS
def test_a_mismatch_is_told_on_all_ranks_in_what_follows(worlds, backend, name, known, length):
    outcomes = worlds.world(backend, 3).run(other_call_before, name, known, length)
    last_came_s = max(following.began_s for _, following, _ in outcomes)
    for first, following, after in outcomes:
        failure = following if first.kind is None else first
        assert failure.kind is dist.DistBackendError, failure
        assert failure.ended_s - last_came_s < loaded(DETECTED_S), failure
        told = re.findall(rf"rank 0 call(?:s|ed) broadcast\(float64\[{length}\], root=0\)(.*)", failure.message)
        told += re.findall(
            rf"ranks? 1.* call(?:s|ed)? broadcast\(float64\[{length + 1}\], root=1\)(.*)", failure.message
        )
        assert len(told) == 2, failure
        # Also of ranks that have gone on, as far as they have told the others.
        assert all(line.startswith(f" at {FIRST_CALL}") for line in told), failure
        assert after.kind is dist.DistBackendError, after


def calls_until_one_fails(name, *args):
    done = 0

    def on_and_on():
        nonlocal done
        while True:
            getattr(dist, name)(np.ones(3), *args)
            done += 1

    return attempt(on_and_on), done, attempt(dist.barrier)


def meet():
    for _ in range(3):
        dist.broadcast(np.ones(3), 0)
    dist.barrier()


@BACKENDS
def test_a_dead_rank_is_named_before_the_root_is_too_far_ahead(new_workers, backend):
    workers = new_workers(3, backend)
    workers.start(meet)
    workers.gather()
    workers.signal(1, signal.SIGKILL)
    assert workers.ended(1)
    workers.start(calls_until_one_fails, "broadcast", 0, ranks=[0, 2])
    for rank in (0, 2):
        failure, done, after = workers.outcome(rank)
        assert issubclass(failure.kind, dist.DistBackendError), failure
        assert f"rank 1 (pid {workers.pids[1]}" in failure.message, failure
        assert done <= AHEAD, done
        assert after.kind is dist.DistBackendError, after


@pytest.mark.parametrize(("call", "other"), [(("broadcast", 2), 0), (("scan",), 2)])
@BACKENDS
def test_ranks_that_wait_for_another_are_told_that_one_of_them_died(new_workers, backend, call, other):
    """The rank whose data ranks 1 and `other` need lives but does not come."""
    workers = new_workers(3, backend)
    workers.start(meet)
    workers.gather()
    workers.start(calls_until_one_fails, *call, ranks=[1, other])
    for rank in (1, other):
        workers.until_asleep(rank)
    killed_s = workers.signal(1, signal.SIGKILL)
    failure, done, _ = workers.outcome(other)
    assert done == 0
    assert f"rank 1 (pid {workers.pids[1]}" in failure.message, failure
    assert failure.ended_s - killed_s < loaded(DETECTED_S), failure


@BACKENDS
def test_a_root_that_is_too_far_ahead_times_out_and_names_those_it_waits_for(new_workers, backend):
    workers = new_workers(3, backend, timeout_s=1.0)
    workers.start(meet)
    workers.gather()
    workers.start(calls_until_one_fails, "broadcast", 0, ranks=[0, 2])
    failure, done, _ = workers.outcome(0)
    assert failure.kind is dist.DistTimeoutError, failure
    assert "rank 1" in failure.message
    assert done == AHEAD


def others_do_not_call_again(group):
    group.broadcast(np.ones(3 + group.rank()), group.rank())
    dist.barrier()  # of the world: all have made their last call


def all_agree(group):
    for root in range(group.size()):
        group.broadcast(np.ones(3), root)


def test_a_mismatch_in_the_last_calls_is_told_at_the_end_of_the_group(worlds):
    warned = worlds.world("gloo", 2).run(warnings_at_the_end, others_do_not_call_again)
    for rank, (warning,) in enumerate(warned):
        lines = ["" if other else r" at test_early_returns\.py:\d+" for other in (rank != 0, rank != 1)]
        assert re.fullmatch(
            "group 'pair' was destroyed, and the ranks' last calls disagreed\n"
            rf"  rank 0 called broadcast\(float64\[3\], root=0\){lines[0]}\n"
            rf"  rank 1 called broadcast\(float64\[4\], root=1\){lines[1]}",
            warning,
        ), warning
    assert worlds.world("gloo", 2).run(warnings_at_the_end, all_agree) == [[], []]
