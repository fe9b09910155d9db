"""Calls whose ranks read and write each other's memory: in every way, by the compiled core and by Python."""

import itertools
import os
import time
from types import SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from worlds import needs_linux

import meshdist as dist
from meshdist import core
from meshdist.backends.gloo.shm import copying, move_selection, reduction
from meshdist.system.env_flags import TUNING

pytestmark = [pytest.mark.timeout(60), needs_linux]
SHARE_WRITTEN = "a share written by the sender"
MOVES = {
    move_selection.READ: 6,
    move_selection.WRITTEN: 6,
    SHARE_WRITTEN: 1,  # a broadcast's
}
REDUCED, PUSHED = "each rank reads and reduces a part", "each rank reads, reduces and writes a part"
COUNTS = (0, 1, 1000, 40_000, 300_001)
LONG = 1_100_000  # more than is written between two checks


def in_one_way(way, python_ranks, program, *args):
    """Run a program in which calls that can be carried out in this way are; on some ranks without the core."""

    def chosen(shm, call, spec, num_bytes, ways, **_):
        if way in ways:
            tried.append(call.collective.native)
        return ways.get(way, next(iter(ways.values())))(shm, call, spec)

    tried = []
    without_core = dist.get_rank() in python_ranks
    before = (
        move_selection.fastest,
        reduction.fastest,
        copying.core,
        move_selection.LEAST_IN_CHUNKS,
        reduction.LEAST_IN_CHUNKS,
    )
    move_selection.fastest = reduction.fastest = chosen
    move_selection.LEAST_IN_CHUNKS = reduction.LEAST_IN_CHUNKS = 0
    copying.core = SimpleNamespace(module=None) if without_core else core
    try:
        with dist.new_group() as group:
            program(group, *args)
    finally:
        (
            move_selection.fastest,
            reduction.fastest,
            copying.core,
            move_selection.LEAST_IN_CHUNKS,
            reduction.LEAST_IN_CHUNKS,
        ) = before
    return sorted(set(tried))


def moves(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in COUNTS:
        blocks = [np.arange(count, dtype=np.int32) * (peer + 1) for peer in range(size)]
        mine, whole = blocks[rank], np.concatenate(blocks)
        for asynchronous in (False, True, False):
            into, pieces = np.zeros_like(whole), [np.zeros_like(mine) for _ in range(size)]
            calls = [
                (group.all_gather_into_tensor, (into, mine), {}, into, whole),
                (group.all_gather, (pieces, mine), {}, pieces, blocks),
                (group.all_to_all_single, (into, np.tile(mine, size)), {}, into, whole),
            ]
            for root in range(size):
                given, taken = mine.copy(), np.zeros_like(mine)
                lists = (pieces, blocks) if rank == root else (None, None)
                calls += [
                    (group.broadcast, (given,), {"src": root}, given, blocks[root]),
                    (group.gather, (mine, lists[0]), {"dst": root}, *lists),
                    (group.scatter, (taken, lists[1]), {"src": root}, taken, mine),
                ]
            for call, args, roots, got, due in calls:
                for array in (into, *pieces):
                    array[...] = -1
                work = call(*args, **roots, async_op=asynchronous)
                if asynchronous:
                    work.wait()
                if due is not None:
                    np.testing.assert_array_equal(np.concatenate(got) if got is pieces else got, np.ravel(due))


def lists(group):
    """Lists in which one array stands for all, and then lists of others: the calls have one plan."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 40_000
    same = np.full(count, float(rank))
    for turn in range(6):
        for different in (False, True):
            given = [np.full(count, 10.0 * rank + peer) for peer in range(size)] if different else [same] * size
            due = [10.0 * peer + rank if different else float(peer) for peer in range(size)]
            taken = [np.empty(count) for _ in range(size)]
            group.all_to_all(taken, given)
            assert [array.tolist() for array in taken] == [[value] * count for value in due], (turn, different)
            root = turn % size
            group.scatter(taken[0], given if rank == root else None, src=root)
            assert taken[0].tolist() == [due[root]] * count, (turn, different)


def reductions(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    drawn = {count: np.random.default_rng(count).random((size, size * count)) * 9 for count in COUNTS}
    drawn[LONG] = np.tile(drawn[COUNTS[-1]], 4)[:, : size * LONG]
    for count, (dtype, op) in [*itertools.product(COUNTS, KINDS), (LONG, KINDS[0])]:
        inputs = [numbers.astype(dtype) for numbers in drawn[count]]
        due = inputs[0]
        for more in inputs[1:]:
            due = UFUNCS[op](due, more)
        if op == "avg":
            due = (due.view(due.real.dtype) / due.real.dtype.type(size)).view(dtype)  # complex numbers by parts
        for asynchronous in (False, True):
            mine, kept = inputs[rank].copy(), np.empty(count, dtype)
            works = [group.all_reduce(mine, op, async_op=asynchronous)]
            works.append(group.reduce_scatter_tensor(kept, inputs[rank], op, async_op=asynchronous))
            if asynchronous:
                for work in works:
                    work.wait()
            np.testing.assert_array_equal(mine, due)
            np.testing.assert_array_equal(kept, due[rank * count : (rank + 1) * count])


UFUNCS = {"sum": np.add, "avg": np.add, "product": np.multiply, "max": np.maximum, "band": np.bitwise_and}
# Python reduces those that the core does not know: float16 and bfloat16.
KINDS = [
    *[("f4", "sum"), ("f8", "avg"), ("c8", "avg"), ("c16", "sum"), ("i2", "product"), ("u1", "max"), ("i8", "band")],
    *[("f2", "sum"), (ml_dtypes.bfloat16, "max")],
]


def exchanges(group, seed):
    """Lists of other sizes in each turn, which no rank knows alone; of some ranks, sometimes, in shared arrays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chance, own_chance = np.random.default_rng(seed), np.random.default_rng((seed, rank))
    tables = [
        chance.choice([0, 10, 3000, 40_000], (size, size), p=p) for p in ([0.2, 0.4, 0.4, 0], [0.1, 0.2, 0.3, 0.4])
    ]
    tables += [np.full((size, size), 20_000), chance.choice([0, 40_000], (size, size))]
    tables += [np.full((size, size), 10), np.full((size, size), 10)]
    tables[-1][0, 1] = 40_000  # the same as before for rank 2
    shared, gathered = dist.empty(150_000), dist.empty(150_000 * size)
    for turn in range(120):
        counts = tables[chance.integers(len(tables))]
        if turn % 5 == 4:
            counts = counts.copy()
            counts[chance.integers(size)] = chance.choice([5, 5000])  # one rank sends others than before
        make = dist.empty if own_chance.random() < 0.3 else np.empty
        given, taken = [make(int(n)) for n in counts[rank]], [make(int(n)) for n in counts[:, rank]]
        for peer in range(size):
            given[peer][...] = turn * 100 + rank * 10 + peer
            taken[peer][...] = -1
        is_async = turn % 7 == 6
        work = group.all_to_all(taken, given, async_op=is_async)
        if is_async:
            work.wait()
        for peer in range(size):
            assert (taken[peer] == turn * 100 + peer * 10 + rank).all(), (turn, counts)
        if chance.random() < 0.3:
            shared[...] = rank
            group.all_gather_into_tensor(gathered, shared)
            assert (gathered.reshape(size, -1) == np.arange(size)[:, None]).all()


def exchanged(tuning, python_ranks):
    before = os.environ.get(TUNING)
    os.environ[TUNING] = tuning
    try:
        for seed in range(2):
            in_one_way(move_selection.READ, python_ranks, exchanges, seed)
    finally:
        os.environ.pop(TUNING) if before is None else os.environ.update({TUNING: before})


@pytest.mark.parametrize("python_ranks", [(), (1,)], ids=["core", "core and Python"])
@pytest.mark.parametrize("tuning", ["off", "force"])
@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_of_changing_sizes_are_right(worlds, size, tuning, python_ranks):
    worlds.world("gloo", size).run(exchanged, tuning, python_ranks)


@pytest.mark.parametrize("python_ranks", [(), (1,)], ids=["core", "core and Python"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", MOVES)
def test_moves_in_every_way_are_the_same(worlds, way, size, python_ranks):
    name = f"{1 / size:.0%} written by the sender, the rest read by the receiver" if way == SHARE_WRITTEN else way
    tried = worlds.world("gloo", size).run(in_one_way, name, python_ranks, moves)
    assert tried == tried[:1] * size
    assert len(tried[0]) == MOVES[way]


@mock.patch.object(move_selection, "_LARGE_PAGES_BYTES", 4 * COUNTS[-1] + 1)
def moves_into_larger_pages(group):
    moves(group)


@pytest.mark.parametrize("python_ranks", [(), (1,)], ids=["core", "core and Python"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_gathers_are_read_from_outputs_that_have_larger_pages(worlds, size, python_ranks):
    way = move_selection.READ_OUTPUTS
    tried = worlds.world("gloo", size).run(in_one_way, way, python_ranks, moves_into_larger_pages)
    assert tried == [["all_gather_into_tensor"]] * size


@pytest.mark.parametrize("python_ranks", [(), (1,)], ids=["core", "core and Python"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("way", "calls"), [(REDUCED, ["all_reduce", "reduce_scatter_tensor"]), (PUSHED, ["all_reduce"])]
)
def test_reductions_by_reading_are_the_same(worlds, way, calls, size, python_ranks):
    for tried in worlds.world("gloo", size).run(in_one_way, way, python_ranks, reductions):
        assert tried == calls


def given_up(group):
    """Rank 0 fails in the middle of its part; rank 1 is about to write into its array, and is slow."""
    x = np.ones(300_000)
    group.barrier()
    if dist.get_rank() == 0:
        failing = mock.patch.object(reduction, "reduce_in_rank_order", side_effect=MemoryError("none is left"))
        with failing, pytest.raises(MemoryError, match="none is left"):
            group.all_reduce(x)
        x[...] = -1
    else:
        memory = group.usable_backend("test")._shm.memories[0]
        write = memory.write

        def slowly(*args):
            time.sleep(0.3)
            write(*args)

        with mock.patch.object(memory, "write", slowly), pytest.raises(dist.DistBackendError):
            group.all_reduce(x)
    dist.barrier()
    assert dist.get_rank() or (x == -1).all()


def test_nobody_writes_into_the_array_of_a_rank_that_has_given_up(worlds):
    worlds.world("gloo", 2).run(in_one_way, PUSHED, (0, 1), given_up)


@pytest.mark.parametrize("way", [move_selection.READ, move_selection.WRITTEN])
def test_a_list_in_which_one_array_is_given_to_all_is_not_remembered_so(worlds, way):
    assert worlds.world("gloo", 3).run(in_one_way, way, (), lists) == [["scatter"]] * 3  # all_to_all tries all ways


def unreadable(group):
    """Rank 0 is told another process for rank 1: one that is not there."""
    x = np.ones(300_000)
    group.barrier()
    shm = group.usable_backend("test")._shm
    if dist.get_rank() == 0:
        for memory in shm.memories:
            memory.pid = 2**22 + 1
        with pytest.raises(dist.DistBackendError, match=r"cannot read the memory of rank 1 .*No such process"):
            group.all_gather([np.empty_like(x), np.empty_like(x)], x)
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0 .*cannot read the memory"):
            group.all_gather([np.empty_like(x), np.empty_like(x)], x)


def test_memory_that_cannot_be_read_is_an_error_on_all_ranks(worlds):
    worlds.world("gloo", 2).run(in_one_way, move_selection.READ, (), unreadable)
