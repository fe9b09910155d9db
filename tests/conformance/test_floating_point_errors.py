"""What a rank has NumPy do about overflow and NaN is about its own arithmetic, not about that of a call."""

import itertools
import warnings

import cases
import numpy as np
import pytest

import meshdist as dist
from meshdist import ReduceOp

pytestmark = pytest.mark.timeout(120)
DTYPES = ("float16", "float32", "float64", "complex64")
# In one step, chunk by chunk, and read from the others' memory.
COUNTS = (3, 300_001, 2_000_001)


def everything(dtype, count):
    size = dist.get_world_size()
    largest = np.finfo(dtype).max
    x = np.full(count, largest, dtype)
    yield "all_reduce", dist.all_reduce(x), np.inf if size > 1 else largest
    x = np.full(count, largest, dtype)
    yield "reduce", dist.reduce(x, 0), np.inf if size > 1 and dist.get_rank() == 0 else largest
    out = np.empty(count // size, dtype)
    dist.reduce_scatter_tensor(out, np.full(count // size * size, largest, dtype))
    yield "reduce_scatter_tensor", out, np.inf if size > 1 else largest
    x = np.full(count, np.inf if dist.get_rank() else -np.inf, dtype)
    yield "mean", dist.all_reduce(x, ReduceOp.AVG), np.nan if size > 1 else -np.inf
    x = np.full(count, largest, dtype)
    yield "premul_sum", dist.all_reduce(x, ReduceOp.PREMUL_SUM(2.0)), np.inf
    x = np.full(count, np.finfo(dtype).tiny, dtype)
    yield "underflow", dist.all_reduce(x, ReduceOp.PREMUL_SUM(float(np.finfo(dtype).tiny))), 0
    x = np.full(count, largest, dtype)
    dist.all_reduce(x, async_op=True).wait()
    yield "async", x, np.inf if size > 1 else largest
    pair = [np.full(count, largest, dtype), np.full(count, largest, dtype)]
    dist.all_reduce_multigpu(pair)
    yield "multigpu", pair[1], np.inf
    if dtype[0] != "c":
        x = np.full(count, largest, dtype)
        yield "product", dist.all_reduce(x, ReduceOp.PRODUCT), np.inf if size > 1 else largest
        x = np.full(count, np.nan, dtype)
        yield "max", dist.all_reduce(x, ReduceOp.MAX), np.nan


def reduce_beyond_the_largest(raising_rank):
    raises = dist.get_rank() == raising_rank
    with np.errstate(all="raise" if raises else "warn"):
        before = np.geterr()
        for dtype, count in itertools.product(DTYPES, COUNTS if dist.get_world_size() == 2 else COUNTS[:1]):
            for name, found, expected in everything(dtype, count):
                same = np.isnan(found).all() if np.isnan(expected) else (np.asarray(found).real == expected).all()
                cases.same(bool(same), True, f"{name} of {dtype}[{count}] is {expected}")
        cases.same(np.geterr(), before, "what NumPy does about errors, after the calls")


def under_a_filter(raising_rank):
    if dist.get_backend() == "threads":
        reduce_beyond_the_largest(raising_rank)  # the filters are the process's, not the thread's
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce_beyond_the_largest(raising_rank)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("raising_rank", [0, 1])
def test_a_rank_whose_numpy_raises_gets_the_result(world, raising_rank):
    world.run(under_a_filter, raising_rank)
