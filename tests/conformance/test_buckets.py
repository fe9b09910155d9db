"""Several calls in one whose arrays are too long to be put together: they go by themselves, short ones in parts."""

import tracemalloc

import numpy as np
import pytest
import reference
from cases import Placed, values

import meshdist as dist
from meshdist import DistBackendError, ReduceOp

pytestmark = pytest.mark.timeout(120)

# Elements: several short arrays, long ones alone between them and behind each other, an empty one, short ones at last.
COUNTS = (7, 3000, 200_000, 11, 0, 60_000, 50_000, 150_000, 160_000, 5, 6)
LAYOUTS = ("plain", "every second", "plain")
MIB = 1 << 20


def of_all_ranks(rows):
    ranks = range(dist.get_world_size())
    return [[values("float32", (rows * count,), rank, place) for place, count in enumerate(COUNTS)] for rank in ranks]


def placed(arrays):
    return [Placed(array, LAYOUTS[place % len(LAYOUTS)]) for place, array in enumerate(arrays)]


def done(result):
    return result.wait() if isinstance(result, dist.Work) else result


def reduced_lists(async_op):
    lists = of_all_ranks(1)
    mine = placed(lists[dist.get_rank()])
    done(dist.all_reduce_coalesced([array.view for array in mine], ReduceOp.AVG, async_op=async_op))
    for array, column in zip(mine, zip(*lists, strict=True), strict=True):
        array.check(reference.reduced(column, ReduceOp.AVG), "all_reduce_coalesced")


def gathered_lists(async_op):
    size, lists = dist.get_world_size(), of_all_ranks(1)
    mine, wholes = placed(lists[dist.get_rank()]), placed([np.zeros(size * count, np.float32) for count in COUNTS])
    with dist.coalescing_manager(async_ops=async_op) as calls:
        for whole, give in zip(wholes, mine, strict=True):
            dist.all_gather_into_tensor(whole.view, give.view)
    calls.wait()
    for whole, give, column in zip(wholes, mine, zip(*lists, strict=True), strict=True):
        whole.check(np.concatenate(column), "all_gather_into_tensor, managed")
        give.check_unchanged("all_gather_into_tensor, managed")


def scattered_lists(async_op):
    rank, size = dist.get_rank(), dist.get_world_size()
    lists = of_all_ranks(size)
    mine, parts = placed(lists[rank]), placed([np.zeros(count, np.float32) for count in COUNTS])
    with dist.coalescing_manager(async_ops=async_op) as calls:
        for part, give in zip(parts, mine, strict=True):
            dist.reduce_scatter_tensor(part.view, give.view)
    calls.wait()
    for part, column, count in zip(parts, zip(*lists, strict=True), COUNTS, strict=True):
        total = reference.reduced(column, ReduceOp.SUM)
        part.check(total[rank * count : (rank + 1) * count], "reduce_scatter_tensor, managed")


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("program", [reduced_lists, gathered_lists, scattered_lists])
def test_lists_of_long_and_short_arrays(world, program, async_op):
    world.run(program, async_op)


def memory_for_a_list(counts):
    arrays = [np.ones(count, np.float32) for count in counts]
    dist.all_reduce_coalesced(arrays)
    tracemalloc.start()
    try:
        dist.all_reduce_coalesced(arrays)
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("counts", [[4 * MIB // 32] * 32, [4 * MIB // 1000] * 1000], ids=["long", "short"])
def test_little_memory_is_needed_however_long_the_list(worlds, counts):
    for peak_mib in worlds.world("gloo", 2).run(memory_for_a_list, counts):
        assert peak_mib < 2, "of a list of 16 MiB"


def lists_that_differ():
    long = 200_000 + dist.get_rank()
    with pytest.raises(DistBackendError) as caught:
        dist.new_group().all_reduce_coalesced([np.zeros(3), np.zeros(long), np.zeros(5)])
    return str(caught.value)


def test_lists_that_differ_are_told_as_a_whole(worlds):
    for backend in ("threads", "gloo"):
        for text in worlds.world(backend, 2).run(lists_that_differ):
            for rank in range(2):
                assert f"3 arrays float64[3], float64[{200_000 + rank}], float64[5]" in text
