"""Exchanges in which ranks send other numbers of rows in each call: the core makes them from a known one."""

import itertools

import numpy as np
import pytest
from failing import fails
from python_calls import fewest_functions
from worlds import WorkerSet, needs_linux

import meshdist as dist
from meshdist import core
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.runtime.flight_recorder import facts_in

pytestmark = [
    pytest.mark.timeout(60),
    needs_linux,
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
# The most rows of a block: such blocks are in the slots, or some of them are too long for these.
FEW, SOME_LONG, LONG = 5, 3_000, 60_000


def rows_of(source, target, number, width, dtype):
    return (np.arange(number * width) % 7 + 10 * source + target).reshape(number, *(width,) * (width > 1)).astype(dtype)


def exchange(group, numbers, width=1, dtype=np.int32, form=list):
    """Exchange as many rows as a matrix says, from each rank to each rank."""
    rank, size = group.rank(), group.size()
    sent = np.concatenate([rows_of(rank, peer, numbers[rank][peer], width, dtype) for peer in range(size)])
    expected = np.concatenate([rows_of(peer, rank, numbers[peer][rank], width, dtype) for peer in range(size)])
    received = np.full_like(expected, 99)
    to, come = (form(int(number) for number in row) for row in (numbers[rank], numbers[:, rank]))
    if form is tuple:
        group.all_to_all_single(received, sent, input_split_sizes=to, output_split_sizes=come)
    else:
        group.all_to_all_single(received, sent, come, to)
    assert np.array_equal(received, expected)


def of_random_numbers(seed, most, width, dtype):
    group, random, own = dist.new_group(), np.random.default_rng(seed), np.random.default_rng([seed, dist.get_rank()])
    for _ in range(300 if most == FEW else 40):
        longest = random.choice([1, FEW, most])
        numbers = random.integers(0, longest + 1, (group.size(), group.size()))
        exchange(group, numbers, width, dtype, own.choice([list, tuple]))


@pytest.mark.parametrize(("width", "dtype"), [(1, "int32"), (3, "float64"), (2, "int8")])
@pytest.mark.parametrize("most", [FEW, SOME_LONG, LONG])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_row_arrives(worlds, size, most, width, dtype):
    worlds.world("gloo", size).run(of_random_numbers, most, most, width, dtype)


def with_even_numbers_on_one_side():
    group = dist.new_group()
    size, rank = group.size(), group.rank()
    for number in range(1, 30):
        sent, received = rows_of(rank, 0, size * number, 1, np.int16), np.zeros(size * number, np.int16)
        lists = [[number] * size, None] if (number + rank) % 2 else [None, (np.int64(number),) * size]
        group.all_to_all_single(received, sent, *lists)
        parts = [rows_of(peer, 0, size * number, 1, np.int16).reshape(size, -1)[rank] for peer in range(size)]
        assert np.array_equal(received, np.concatenate(parts))


def test_numbers_may_be_left_out_on_one_side(worlds):
    worlds.world("gloo", 3).run(with_even_numbers_on_one_side)


def functions_of_new_numbers():
    group, numbers, rank = dist.new_group(), itertools.count(1), dist.get_rank()

    def call():
        number = next(numbers)
        rows = [number - 1, number + 1] if rank == 0 else [number + 1, number - 1]
        group.all_to_all_single(np.zeros(2 * number), np.zeros(2 * number), rows, rows)

    call()
    return fewest_functions(call)


def test_they_are_made_without_python(worlds):
    assert worlds.world("gloo", 2).run(functions_of_new_numbers) == [[], []]


def records_of_new_numbers():
    group = dist.new_group()
    for number in range(3, 6):
        exchange(group, np.full((2, 2), number), 2, np.float32)
    facts = [facts_in(record) for record in group.recorder.records()]
    return [(one.text, one.sent, one.received) for one in facts if one.group == group.name]


def test_the_flight_recorder_has_the_shape_of_each(worlds):
    for found in worlds.world("gloo", 2).run(records_of_new_numbers):
        arrays = [[("float32", (2 * number, 2))] for number in range(3, 6)]
        text = "all_to_all_single(float32[split sizes, rows of 2])"
        assert found == [(text, array, array) for array in arrays]


def numbers_that_disagree(long):
    group = dist.new_group()
    rank, rows = group.rank(), LONG if long else 4
    for number in range(3, 6):
        exchange(group, np.full((2, 2), number))
    to, come = [rows, rows], [rows, rows + (rank == 1)]
    fails(
        dist.DistBackendError,
        lambda: group.all_to_all_single(np.zeros(sum(come), np.int32), np.zeros(sum(to), np.int32), come, to),
        "rows",
    )
    fails(dist.DistBackendError, lambda: exchange(group, np.full((2, 2), 3)), "cannot be used after an earlier failure")


@pytest.mark.parametrize("long", [False, True])
def test_ranks_that_disagree_are_told(worlds, long):
    worlds.world("gloo", 2).run(numbers_that_disagree, long)


def wrong_ones():
    group = dist.new_group()
    for number in range(3, 6):
        exchange(group, np.full((2, 2), number))
    x, y = np.zeros(8, np.int32), np.zeros(8, np.int32)
    call = group.all_to_all_single
    fails(
        ValueError, lambda: call(x, y, [4, 4], [4, 3]), "must be 2 sizes of at least 0 whose sum is dim 0 of input, 8"
    )
    fails(ValueError, lambda: call(x, y, [9, -1], [4, 4]), "must be 2 sizes of at least 0 whose sum is dim 0 of output")
    fails(ValueError, lambda: call(x, y, [8], [4, 4]), "must be 2 sizes")
    fails(TypeError, lambda: call(x, y, [4, 4.0], [4, 4]), "output_split_sizes must be a list of integers")
    fails(ValueError, lambda: call(x, np.zeros((8, 2), np.int32), [4, 4], [4, 4]), "must agree in all but dim 0")
    fails(TypeError, lambda: call(x, np.zeros(8), [4, 4], [4, 4]), "dtype")
    exchange(group, np.full((2, 2), 2))


def test_wrong_ones_are_refused_as_if_they_were_the_first(worlds):
    worlds.world("gloo", 2).run(wrong_ones)


def without_numbers_after_calls_with_them():
    group = dist.new_group()
    rank, call = group.rank(), group.all_to_all_single
    for number in range(3, 6):
        exchange(group, np.full((2, 2), number))
    for length in (8, 12):  # ranks that write the same call in other ways
        received, sent = np.zeros(length, np.int32), np.full(length, rank, np.int32)
        if rank == 0:
            call(received, sent, None, None)
        else:
            call(received, sent)
        assert received.tolist() == [0] * (length // 2) + [1] * (length // 2)
    sent = np.ones(16)[::2] if rank else np.ones(8)
    call(np.zeros(8), sent, None, None)
    fails(ValueError, lambda: call(np.zeros(8), np.ones(4), None, None), "output must have the shape of input")
    exchange(group, np.full((2, 2), 2))


def test_a_call_without_numbers_is_another_one(worlds):
    worlds.world("gloo", 2).run(without_numbers_after_calls_with_them)


def into_the_array_that_is_sent(length, lists):
    group = dist.new_group()
    rank, size = group.rank(), group.size()
    numbers = ([length] * size,) * 2 if lists else ()
    other = np.zeros(size * length)
    for turn in range(50):
        array = np.repeat(np.arange(size) + 10.0 * rank + turn, length)
        target = array if turn > 30 or turn % 3 == 1 else other
        group.all_to_all_single(target, array, *numbers)
        assert np.array_equal(target, np.repeat(10.0 * np.arange(size) + rank + turn, length))


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("length", [4, LONG])
def test_what_is_received_may_replace_what_is_sent(worlds, length, lists):
    worlds.world("gloo", 3).run(into_the_array_that_is_sent, length, lists)


def without_memory_for_others():
    group = dist.new_group()
    group.barrier()
    reserve = ShmGroup.reserve

    def refuse(shm, num_bytes, slots=None):
        if num_bytes >= 32 << 10:
            raise dist.DistBackendError("no memory")
        return reserve(shm, num_bytes, slots)

    if group.rank() == 0:
        ShmGroup.reserve = refuse
    try:
        for number in range(3, 6):
            exchange(group, np.full((2, 2), number))
    finally:
        ShmGroup.reserve = reserve


def test_a_call_needs_no_memory_for_those_after_it(worlds):
    worlds.world("gloo", 2).run(without_memory_for_others)


def times_of_ways():
    group, random = dist.new_group(), np.random.default_rng(1)
    for _ in range(150):
        exchange(group, random.integers(80_000, 120_000, (2, 2)))
    choices = group.usable_backend("test").choices()
    return [choice.seconds for choice in choices if choice.kind.startswith("all_to_all_single")]


def test_the_ways_of_long_ones_are_timed(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(times_of_ways)
        for found in workers.gather():
            seconds = [took for ways in found for took in ways.values()]
            assert seconds
            assert min(seconds) > 1e-5
