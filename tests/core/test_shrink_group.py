"""shrink_group: some ranks continue without the others, which may be dead, hung, or well."""

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from worlds import WorkerSet, report, worker_rank

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
# What a rank that waits for a dead one may take to notice, and to go on.
NOTICED_S = 3.0


def on_4_ranks(program, *args):
    return dist.run(program, 4, args, timeout=20)


@pytest.fixture
def workers(worlds):
    with WorkerSet(worlds.nursery, 4) as workers:
        yield workers


@pytest.fixture
def world_workers(workers):
    workers.join()
    return workers


def sum_of(value, group=None):
    return int(dist.all_reduce(np.array(value), group=group))


# ---- Any group


def shrink_one():
    rank = dist.get_rank()
    old = dist.new_group([0, 1, 2], group_desc="workers", timeout=22)
    if rank != 3:
        sum_of(1, old)
    if rank in (1, 3):
        return None
    new = dist.shrink_group([1], old)
    assert (new.ranks, new.rank(), new.group_desc, new.timeout_s) == ((0, 2), rank // 2, "workers", 22.0)
    assert new.name != old.name
    with pytest.raises(ValueError, match="'workers'.*was shrunk; use what shrink_group returned"):
        old.barrier()
    with pytest.raises(ValueError, match="has already been destroyed"):
        dist.destroy_process_group(old)
    with pytest.raises(ValueError, match="has already been destroyed"):
        dist.shrink_group([1], old)
    # The world is as it was.
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)
    return sum_of(rank, new)


def test_a_group_is_shrunk():
    assert on_4_ranks(shrink_one) == [2, None, 2, None]


def shrink_on_every_world():
    rank, size = dist.get_rank(), dist.get_world_size()
    old = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    sum_of(1, old)
    if rank == size - 1:  # the first of the old group
        return
    new = dist.shrink_group([0], old)
    assert new.ranks == tuple(range(size - 1))[::-1]
    assert sum_of(rank, new) == sum(range(size - 1))
    dist.destroy_process_group(new)


def test_a_group_is_shrunk_on_every_backend(world_of_several):
    world_of_several.run(shrink_on_every_world)


def shrink_down():
    group = dist.new_group()
    for last in (3, 2, 1):
        if dist.get_rank() > last - 1:
            return None
        group = dist.shrink_group([last], group)
        assert sum_of(1, group) == last
    return group.ranks


def test_a_group_is_shrunk_again_and_again():
    assert on_4_ranks(shrink_down) == [(0,), None, None, None]


# ---- The world


def shrink_the_world():
    rank = dist.get_rank()
    pair = dist.new_group([0, 3], group_desc="pair")
    if rank in (0, 3):
        assert sum_of(1, pair) == 2
    mesh = dist.init_device_mesh("cpu", (4,))
    assert int(mesh.all_reduce(np.array(1))) == 4
    if rank == 1:
        return None
    world = dist.shrink_group([1])
    assert dist.group.WORLD is world
    assert dist.GroupMember.WORLD is world
    assert dist.get_process_group_ranks() == [0, 1, 2]
    assert dist.get_pg_count() == 1
    new_rank = dist.get_rank()
    assert (world.rank(), world.size(), dist.get_world_size()) == (new_rank, 3, 3)
    # src and dst are the new numbers.
    x = np.array(new_rank)
    dist.broadcast(x, src=1)
    assert x == 1
    # What speaks of the old numbers is of no more use, and says so.
    if rank in (0, 3):
        with pytest.raises(ValueError, match="'pair'.*the world was shrunk"):
            pair.barrier()
    with pytest.raises(ValueError, match="'world'.*the world was shrunk"):
        mesh.all_reduce(np.array(1))
    # Groups, meshes and messages of the new world.
    last = dist.new_group([1, 2])
    if new_rank:
        assert sum_of(new_rank, last) == 3
        if new_rank == 1:
            dist.send(np.array(7), 2)
        else:
            dist.recv(x, 1)
            assert x == 7
    mesh = dist.init_device_mesh("cpu", (3,))
    return new_rank, int(mesh.all_reduce(np.array(rank))), sum_of(rank)


def test_the_world_is_shrunk():
    assert on_4_ranks(shrink_the_world) == [(0, 5, 5), None, (1, 5, 5), (2, 5, 5)]


def shrink_and_say():
    result = shrink_the_world()
    if result is not None:
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return result


@needs_linux
def test_the_world_of_processes_is_shrunk(world_workers):
    world_workers.start(shrink_and_say)
    assert world_workers.gather() == [(0, 5, 5), None, (1, 5, 5), (2, 5, 5)]


def shrink_twice():
    for excluded in (0, 1):
        if dist.get_rank() == excluded:
            return None
        world = dist.shrink_group([excluded])
        assert sum_of(1) == world.size()
    return dist.get_rank(), dist.get_world_size()


def test_the_world_is_shrunk_twice():
    assert on_4_ranks(shrink_twice) == [None, (0, 2), None, (1, 2)]


# ---- Dead ranks


def die_at(victim, group_ranks):
    group = dist.new_group(group_ranks) if group_ranks else None
    sum_of(1, group)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=f"rank {victim} .*(killed|died)"):
        sum_of(1, group)
    new = dist.shrink_group([victim], group)
    assert sum_of(1, new) == 3
    assert time.monotonic() - began_s < NOTICED_S
    x = np.zeros(3)
    if new.rank() == 0:
        new.send(np.ones(3), 2)
    elif new.rank() == 2:
        new.recv(x, 0)
    assert sum_of(1, dist.new_group([0, 1, 2]) if group is None else new) == 3
    return dist.get_rank(), dist.get_world_size()


@needs_linux
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("of", ["the world", "a group"])
def test_a_dead_rank_is_left_behind(world_workers, of, victim):
    world_workers.start(die_at, victim, None if of == "the world" else [0, 1, 2, 3])
    alive = [rank for rank in range(4) if rank != victim]
    outcomes = [world_workers.outcome(rank) for rank in alive]
    assert outcomes == ([(new, 3) for new in range(3)] if of == "the world" else [(rank, 4) for rank in alive])


def join_again(port):
    sum_of(1)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.shrink_group([1])
    assert sum_of(1) == 3
    place = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=place[0], world_size=place[1], timeout=20)
    result = dist.get_rank(), sum_of(1)
    dist.destroy_process_group()
    return result


def join_first(port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker_rank(), world_size=4, timeout=20)
    return join_again(port)


@needs_linux
def test_those_that_are_left_may_init_again_with_the_same_store(workers):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with store:
        workers.start(join_first, store.port)
        assert [workers.outcome(rank) for rank in (0, 2, 3)] == [(0, 3), (1, 3), (2, 3)]


def die_with_the_store(url, other_url):
    dist.init_process_group("gloo", url, rank=worker_rank(), world_size=4, timeout=20)
    sum_of(1)
    if worker_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 0 .*(killed|died)"):
        sum_of(1)
    began_s = time.monotonic()
    with pytest.raises(dist.DistError, match=r"shrink_group on group 'world'.*the store .*does not answer") as raised:
        dist.shrink_group([0])
    for words in ("init_process_group() on the 3 remaining ranks", "start the job with meshrun"):
        assert words in str(raised.value)
    assert time.monotonic() - began_s < NOTICED_S
    assert dist.get_world_size() == 4  # nothing has changed
    # The way out that the message names.
    dist.destroy_process_group()
    dist.init_process_group("gloo", other_url, rank=worker_rank() - 1, world_size=3, timeout=20)
    result = sum_of(1)
    dist.destroy_process_group()
    return result


@needs_linux
def test_a_store_that_died_with_the_rank_is_said(workers, port, tmp_path):
    workers.start(die_with_the_store, f"tcp://127.0.0.1:{port}", f"file://{tmp_path}/meeting")
    assert [workers.outcome(rank) for rank in (1, 2, 3)] == [3, 3, 3]


def leave_out_a_hung_rank():
    sum_of(1)
    if dist.get_rank() == 1:
        report("asleep")
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    work = dist.all_reduce(np.array(1), async_op=True)
    later = dist.all_reduce(np.array(1), async_op=True)
    dist.new_group([0, 2, 3]).barrier()  # all have begun
    began_s = time.monotonic()
    dist.shrink_group([1], shrink_flags=dist.SHRINK_ABORT)
    for each in (work, later):
        with pytest.raises(dist.DistBackendError, match="shrink_group, which excludes ranks"):
            each.wait()
    assert time.monotonic() - began_s < NOTICED_S
    return sum_of(1)


@needs_linux
def test_calls_in_flight_are_aborted(world_workers):
    """With the flag: those that wait for a rank that hangs would end with the timeout only."""
    world_workers.start(leave_out_a_hung_rank)
    world_workers.reported(1)
    assert [world_workers.outcome(rank) for rank in (0, 2, 3)] == [3, 3, 3]


def go_on_alone():
    sum_of(1)
    if dist.get_rank() == 1:
        report("asleep")
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    work = dist.all_reduce(np.array(1), async_op=True)
    dist.shrink_group([1], None, dist.SHRINK_ABORT)
    with pytest.raises(dist.DistBackendError, match="shrink_group"):
        work.wait()
    return sum_of(1), dist.get_world_size()


@needs_linux
def test_the_last_rank_goes_on_alone(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(go_on_alone)
        workers.reported(1)
        assert workers.outcome(0) == (1, 1)


def let_calls_end():
    group = dist.new_group()
    x = np.ones(1000)
    works = [group.all_reduce(x, async_op=True) for _ in range(20)]
    if dist.get_rank() == 2:
        for work in works:
            work.wait()
        return float(x[0])
    new = dist.shrink_group([2], group)
    assert all(work.is_success() for work in works)
    assert sum_of(1, new) == 2
    return float(x[0])


def test_calls_in_flight_end_first(world_of_3):
    """Without the flag."""
    assert world_of_3.run(let_calls_end) == [3.0**20] * 3


# ---- The rank that is left out, and lives


def be_left_out(done):
    old = dist.new_group(group_desc="old")
    unused = dist.new_group(group_desc="unused")
    sum_of(1, old)
    if dist.get_rank() != 2:
        new = dist.shrink_group([2], None)
        assert sum_of(1, new) == 3
        if done is not None:
            done.wait(20)
        return None
    if done is None:
        report("waiting")
    for group in (old, unused, None):
        words = r"rank [013].* (has destroyed the group|called destroy_process_group)"
        with pytest.raises(dist.DistBackendError, match=words):
            sum_of(1, group)
    dist.destroy_process_group()
    if done is not None:
        done.set()
    return "told"


def test_who_is_left_out_is_told():
    assert on_4_ranks(be_left_out, threading.Event()) == [None, None, "told", None]


@needs_linux
def test_a_process_that_is_left_out_is_told(world_workers):
    """The others live on and are in other groups: it must not wait for them."""
    world_workers.start(be_left_out, None)
    assert world_workers.reported(2) == "waiting"
    assert world_workers.gather() == [None, None, "told", None]


# ---- Bad input


WRONG = {
    "none": (([],), ValueError, r"ranks_to_exclude must be a non-empty list without duplicates, got \[\]"),
    "all": (([0, 1, 2, 3],), ValueError, r"ranks_to_exclude must leave a rank in the group, got all 4"),
    "twice": (([1, 1],), ValueError, r"ranks_to_exclude must be a non-empty list without duplicates.*\[1, 1\]"),
    "outside": (([4],), ValueError, "ranks_to_exclude must be 0 to 3, got 4"),
    "negative": (([-1],), ValueError, "ranks_to_exclude must be 0 to 3, got -1"),
    "fraction": (([1.0],), TypeError, r"ranks_to_exclude must be a list of integers, got \[1.0\]"),
    "a number": ((1,), TypeError, "ranks_to_exclude must be a list of integers, got 1"),
    "nothing": ((None,), TypeError, "ranks_to_exclude must be a list of integers, got None"),
    "flags": (([1], None, 2), ValueError, r"shrink_flags must be SHRINK_DEFAULT \(0\) or SHRINK_ABORT \(1\), got 2"),
    "flags as text": (([1], None, "abort"), ValueError, "shrink_flags must be .*got 'abort'"),
}


def refuse(name):
    arguments, kind, words = WRONG[name]
    with pytest.raises(kind, match=rf"shrink_group on group 'world' \(rank . of 4\): {words}"):
        dist.shrink_group(*arguments)
    return sum_of(1), dist.get_pg_count()


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_changes_nothing(name):
    assert on_4_ranks(refuse, name) == [(4, 1)] * 4


def refuse_oneself():
    rank = dist.get_rank()
    words = rf"this rank is one of those to exclude, \[{rank}\]; only the remaining ranks"
    with pytest.raises(dist.DistError, match=words):
        dist.shrink_group([rank])
    one = dist.new_group([dist.get_rank()])
    with pytest.raises(ValueError, match="must leave a rank in the group"):
        dist.shrink_group([0], one)
    with pytest.raises(ValueError, match="this rank is not in the group"):
        dist.shrink_group([0], NON_MEMBER)
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        dist.shrink_group([0], "world")
    return sum_of(1)


def test_who_must_not_call():
    assert on_4_ranks(refuse_oneself) == [4] * 4


def disagree(first_is_there):
    group = dist.new_group(group_desc="all")
    if dist.get_rank() == 0:
        new = dist.shrink_group([3], group)
        first_is_there.set()
        return sum_of(1, new)
    if dist.get_rank() == 3:
        return None
    assert first_is_there.wait(20)
    with pytest.raises(
        ValueError,
        match=r"'all'.*must be the same on all remaining ranks: global rank 0 has excluded \[3\], this rank \[2,3\]"
        if dist.get_rank() == 1
        else r"global rank 0 has excluded \[3\], this rank \[1\]",
    ):
        dist.shrink_group([3, 2] if dist.get_rank() == 1 else [1], group)
    return sum_of(1, dist.shrink_group([3], group))


def test_ranks_that_leave_out_others_are_told():
    assert on_4_ranks(disagree, threading.Event()) == [3, 3, 3, None]
