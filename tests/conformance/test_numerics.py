"""What a reduction promises of its bits: equal on all ranks and from run to run; NaN and overflow as in NumPy."""

import itertools

import cases
import numpy as np
import pytest

import meshdist as dist
from meshdist import ReduceOp

pytestmark = pytest.mark.timeout(120)
DTYPES = ("float32", "float64", "complex128")


def random_array(dtype, count, rank):
    rng = np.random.default_rng([rank, count])
    array = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)
    return (array + 1j * array[::-1] if dtype[0] == "c" else array).astype(dtype)


def float_sums(op):
    """Return the bytes of sums whose order matters, each made three times in two groups."""
    rank, size = dist.get_rank(), dist.get_world_size()
    all_bytes, groups = [], (None, None, dist.new_group())
    for dtype, count in itertools.product(DTYPES, (5, 1500, 30_001, 140_003)):
        mine, runs = random_array(dtype, count, rank), []
        for group in groups:
            x = mine.copy()
            dist.all_reduce(x, op, group=group)
            runs.append(x.tobytes())
        cases.same(runs[1:], runs[:1] * 2, f"bits of run after run, {dtype}[{count}]")
        all_bytes.append(runs[0])
        if rank == 0:
            check_near(x, [random_array(dtype, count, other) for other in range(size)], op)
    return all_bytes


def check_near(x, arrays, op):
    dtype, size = x.dtype, len(arrays)
    exact = np.sum(np.stack(arrays), axis=0, dtype=np.result_type(dtype, np.longdouble))
    scale = np.sum(np.abs(np.stack(arrays)), axis=0)
    error = np.abs(x * dtype.type(size if op is ReduceOp.AVG else 1) - exact)
    cases.same(bool((error <= 2 * size * np.finfo(dtype).eps * scale).all()), True, f"sum of {dtype}[{x.size}] is near")


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_sums_of_floats_have_the_same_bits_on_all_ranks(world, op):
    results = world.run(float_sums, op)
    assert all(result == results[0] for result in results)


def reduce_and_scatter(dtype):
    # The same call after another finds the same bits, also in reduce and reduce_scatter.
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (40, 20_000, 140_000):
        mine = random_array(dtype, count * size, rank)
        outs = [dist.reduce_scatter_tensor(np.empty(count, dtype), mine).tobytes() for _ in range(3)]
        cases.same(outs[1:], outs[:1] * 2, f"bits of reduce_scatter_tensor, {count} elements")
        outs = [dist.reduce(mine.copy(), size - 1).tobytes() for _ in range(3)]
        cases.same(outs[1:], outs[:1] * 2, f"bits of reduce, {count} elements")


def test_reduce_and_reduce_scatter_have_the_same_bits_in_every_run(world):
    world.run(reduce_and_scatter, "float32")


SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]


UFUNCS = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.SUM: np.add}


def specials():
    rank, size = dist.get_rank(), dist.get_world_size()
    all_bytes = []
    for (op, ufunc), dtype, repeat in itertools.product(
        UFUNCS.items(), ("float16", "float32", "float64"), (1, 1000, 20_000)
    ):
        columns = [np.tile(np.roll(np.array(SPECIAL, dtype), 2 * other), repeat) for other in range(size)]
        x = columns[rank].copy()
        with np.errstate(invalid="ignore"):
            dist.all_reduce(x, op)
            np.testing.assert_array_equal(x, ufunc.reduce(columns), f"{cases.where()}, {op}, {dtype}[{x.size}]")
        all_bytes.append(x.tobytes())
    return all_bytes


def test_nan_and_infinities_are_as_in_numpy_on_all_ranks(world):
    results = world.run(specials)
    assert all(result == results[0] for result in results)


def overflow():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 20_000, 300_000):
        x = dist.all_reduce(np.full(count, 100, np.int8))
        cases.same(set(x.tolist()), {(100 * size + 128) % 256 - 128}, "int8 wraps")
        x = dist.all_reduce(np.full(count, rank + 1, np.uint64), "product")
        cases.same(set(x.tolist()), {int(np.prod(np.arange(1, size + 1)))}, "product of integers")
        with np.errstate(over="ignore"):
            x = dist.all_reduce(np.full(count, 60_000, np.float16))
        cases.same(set(x.tolist()), {60_000.0 if size == 1 else np.inf}, "float16 overflows to infinity")


def test_overflow_is_as_in_numpy(world):
    world.run(overflow)


def bool_reductions():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = np.array([False, True, rank == 0, rank != 0])
    found = {op.name: dist.all_reduce(mine.copy(), op).tolist() for op in ReduceOp if op is not ReduceOp.AVG}
    some, every, odd = (
        [False, True, True, size > 1],
        [False, True, size == 1, False],
        [False, size % 2 == 1, True, size % 2 == 0],
    )
    expected = {"SUM": some, "MAX": some, "BOR": some, "PRODUCT": every, "MIN": every, "BAND": every, "BXOR": odd}
    cases.same(found, expected, "reductions of bool")


def test_bool_adds_as_or_and_multiplies_as_and(world):
    world.run(bool_reductions)
