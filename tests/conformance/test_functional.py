"""The functional forms: the results of the collectives, and inputs that stay as they are."""

import cases
import numpy as np
import pytest
import reference
from cases import Placed, values

import meshdist as dist
from meshdist import ReduceOp, functional

pytestmark = pytest.mark.timeout(120)


def same(actual, expected, what):
    if isinstance(expected, list):
        cases.same(len(actual), len(expected), what)
        for one, other in zip(actual, expected, strict=True):
            same(one, other, what)
    elif actual.dtype != expected.dtype or actual.shape != expected.shape or actual.tobytes() != expected.tobytes():
        raise AssertionError(f"{cases.where()}, {what}: got {actual}, expected {expected}")


def every_form(layout):
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1
    arrays = [values("float64", (size, 3), other) for other in range(size)]
    x = Placed(arrays[rank], layout)
    rows, total = list(x.view), reference.reduced(arrays, ReduceOp.SUM)
    columns = [np.ascontiguousarray(array[rank]) for array in arrays]
    same(functional.all_reduce(x.view), total, "all_reduce")
    same(functional.all_reduce(x.view, "max"), reference.reduced(arrays, ReduceOp.MAX), "all_reduce")
    same(functional.broadcast(x.view, root), arrays[root], "broadcast")
    same(functional.reduce(x.view, root), total if rank == root else arrays[rank], "reduce")
    same(functional.all_gather(x.view), arrays, "all_gather")
    same(functional.all_gather_into_tensor(x.view), np.concatenate(arrays), "all_gather_into_tensor")
    same(functional.all_gather_into_tensor(np.array(rank)), np.arange(size), "all_gather_into_tensor of numbers")
    gathered = functional.gather(x.view, root)
    same(gathered, arrays, "gather") if rank == root else cases.same(gathered, None, "gather")
    same(functional.scatter(rows[0], rows if rank == root else None, root), arrays[root][rank], "scatter")
    same(functional.reduce_scatter(rows), total[rank].copy(), "reduce_scatter")
    same(functional.reduce_scatter_tensor(x.view), total[rank : rank + 1], "reduce_scatter_tensor")
    same(functional.all_to_all(rows), columns, "all_to_all")
    same(functional.all_to_all_single(x.view), np.stack(columns), "all_to_all_single")
    counts = [1] * size
    same(functional.all_to_all_single(x.view, counts, counts), np.stack(columns), "all_to_all_single with split sizes")
    x.check_unchanged("functional forms")


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_every_form(world, layout):
    world.run(every_form, layout)
