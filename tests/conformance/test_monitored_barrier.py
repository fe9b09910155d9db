"""Barriers with a timeout of their own: who did not come is named."""

import datetime
import re
import time

import cases
import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)


def all_come():
    for _ in range(5):
        assert dist.monitored_barrier() is None
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=20), wait_all_ranks=True)
        dist.barrier(timeout=20)
        dist.new_group().monitored_barrier(timeout=20)


def test_all_come(world):
    world.run(all_come)


def one_does_not_come(name):
    group, rank = dist.new_group(), dist.get_rank()
    group.all_reduce(np.ones(1))
    if rank != 1:
        begin = time.monotonic()
        with pytest.raises(dist.DistError, match=rf"{name}.*ranks? \[?1\b"):
            getattr(group, name)(timeout=0.5)
        took_s = time.monotonic() - begin
        cases.same(0.3 < took_s < 5, True, f"{took_s} s for a timeout of 0.5 s")
    dist.barrier()


@pytest.mark.parametrize("name", ["monitored_barrier", "barrier"])
def test_who_does_not_come_is_named(world_of_3, name):
    world_of_3.run(one_does_not_come, name)


def two_do_not_come():
    group, rank = dist.new_group(), dist.get_rank()
    group.all_reduce(np.ones(1))
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError, match=r"ranks? \[?1\b.*\b2\b"):
            dist.monitored_barrier(group, 0.3, wait_all_ranks=True)
    dist.barrier()


def test_all_who_do_not_come_are_named(world_of_3):
    world_of_3.run(two_do_not_come)


def refused():
    with pytest.raises(TypeError, match="timeout must be"):
        dist.monitored_barrier(timeout="soon")
    with pytest.raises(ValueError, match="timeout must"):
        dist.barrier(timeout=-1)


def test_timeouts_that_are_none(world_of_3):
    world_of_3.run(refused)


def the_documented_calls():
    # The page's example, on a group: rank 0 makes two calls in a row, and both name who is missing.
    group, rank, size = dist.new_group(), dist.get_rank(), dist.get_world_size()
    if rank != 1:
        with pytest.raises(dist.DistTimeoutError, match=r"ranks? \[?1\b"):
            dist.monitored_barrier(group, 0.4)
    dist.barrier()  # of the world: all have given up
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError) as caught:
            dist.monitored_barrier(group, 0.2, wait_all_ranks=True)
        named = str(caught.value).partition("waiting for")[2].partition("\n")[0]
        assert re.findall(r"rank (\d+)", named) == [str(other) for other in range(1, size)]
    dist.barrier()
    # The group is as good as new, for the same and for other calls.
    for _ in range(2):
        group.monitored_barrier(timeout=20)
        assert group.all_reduce(np.array([rank])).item() == sum(range(size))


def test_a_timeout_leaves_the_group_usable(world_of_3):
    world_of_3.run(the_documented_calls)


def another_call(is_first):
    group = dist.new_group(timeout=20)
    if not is_first:
        group.all_reduce(np.ones(1))
    call = group.monitored_barrier if dist.get_rank() != 1 else lambda: group.all_reduce(np.ones(1))
    with pytest.raises(dist.DistBackendError, match="disagree") as caught:
        call()
    assert "monitored_barrier()" in str(caught.value)
    assert "all_reduce(float64[1]" in str(caught.value)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(("backend", "size"), [("threads", 3), ("gloo", 3), ("gloo-tcp", 3), ("gloo-hosts", 4)])
def test_another_call_is_a_mismatch(worlds, backend, size, is_first):
    worlds.world(backend, size).run(another_call, is_first)
