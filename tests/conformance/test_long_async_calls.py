"""Async calls of many bytes, whoever carries them out: a thread that waits, or the progress thread."""

import numpy as np
import pytest
from until import until

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
LENGTHS = [100, 20_000, 200_000]  # in one step, and in several ways


@pytest.fixture(params=["threads", "gloo", "gloo-tcp"])
def backend(request):
    return request.param


def finish_by_wait(work):
    work.wait()


def finish_by_limited_wait(work):
    work.wait(timeout=30)


def finish_by_asking(work):
    until(work.is_completed, "the call is done")


def finish_by_callback(work):
    done = []
    work.get_future().then(lambda _: done.append(1))
    until(lambda: done, "the callback has run")


FINISHES = [finish_by_wait, finish_by_limited_wait, finish_by_asking, finish_by_callback]


def in_other_ways_on_each_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    for length in LENGTHS:
        whole = np.zeros(size * length)
        for turn in range(12):
            array = np.full(length, float(rank + turn))
            works = [dist.all_reduce(array, async_op=True), dist.all_gather_into_tensor(whole, array, async_op=True)]
            for number, work in enumerate(works):
                FINISHES[(turn + rank + number) % len(FINISHES)](work)
            expected = sum(range(size)) + size * turn
            assert (array == expected).all()
            assert (whole == expected).all()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_wait_in_other_ways(worlds, backend, size):
    worlds.world(backend, size).run(in_other_ways_on_each_rank)


def for_groups_in_another_order_on_each_rank():
    rank, groups = dist.get_rank(), [dist.new_group() for _ in range(3)]
    for length in LENGTHS:
        for turn in range(8):
            arrays = [np.full(length, float(turn + number)) for number in range(len(groups))]
            works = [group.all_reduce(x, async_op=True) for group, x in zip(groups, arrays, strict=True)]
            for number in range(len(works)):
                works[(number + rank + turn) % len(works)].wait()
            size = dist.get_world_size()
            assert [x[-1] for x in arrays] == [size * (turn + number) for number in range(len(groups))]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_wait_for_groups_in_any_order(worlds, backend, size):
    worlds.world(backend, size).run(for_groups_in_another_order_on_each_rank)


def an_error_of_a_long_call():
    group = dist.new_group()
    array = np.zeros(200_000)
    for _ in range(3):
        group.all_reduce(array, async_op=True).wait()
    work = group.all_reduce(array[group.rank() * 100 :], async_op=True)
    with pytest.raises(dist.DistBackendError, match="the ranks disagree"):
        work.wait()
    with pytest.raises(dist.DistBackendError, match="the ranks disagree"):
        work.wait()
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError, match="cannot be used after an earlier failure"):
        group.all_reduce(array, async_op=True).wait()


@pytest.mark.parametrize("size", [2, 3])
def test_its_error_is_raised_in_every_wait(worlds, backend, size):
    worlds.world(backend, size).run(an_error_of_a_long_call)


def waits_of_ranks_that_block_each_other():
    rank, groups, array = dist.get_rank(), [dist.new_group(timeout=20.0) for _ in range(2)], np.zeros(200_000)
    for group in groups:
        for _ in range(3):
            group.all_reduce(array, async_op=True).wait()
    with pytest.raises(dist.DistBackendError, match="deadlock: the ranks wait for each other"):
        groups[rank].all_reduce(array, async_op=True).wait()


def test_a_deadlock_of_two_waits_is_found(worlds):
    worlds.world("gloo", 2).run(waits_of_ranks_that_block_each_other)
