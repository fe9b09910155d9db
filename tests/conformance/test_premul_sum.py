"""PREMUL_SUM with the factor of each rank; the deprecated reduce_op."""

import cases
import numpy as np
import pytest
from cases import Placed, values

import meshdist as dist

pytestmark = pytest.mark.timeout(120)


def expected_of(arrays):
    total = arrays[0] * np.asarray(1).astype(arrays[0].dtype)
    for rank, array in enumerate(arrays[1:], 1):
        total = total + array * np.asarray(rank + 1).astype(array.dtype)
    return total


def scaled_sums():
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("int32", "float32", "float64", "complex64", "float16"):
        for count, layout in ((4, "plain"), (7, "every second"), (30_000, "plain")):
            arrays = [
                values(name, (size * count,), other) % 8
                if name != "complex64"
                else values(name, (size * count,), other)
                for other in range(size)
            ]
            total, op = expected_of(arrays), dist.premul_sum(rank + 1)
            x = Placed(arrays[rank], layout)
            dist.all_reduce(x.view, op)
            x.check(total, f"all_reduce premul_sum {name}")
            x = Placed(arrays[rank], layout)
            dist.reduce(x.view, size - 1, op)
            x.check(total if rank == size - 1 else arrays[rank], f"reduce premul_sum {name}")
            given, x = Placed(arrays[rank], layout), Placed(np.zeros(count, arrays[0].dtype), "plain")
            dist.reduce_scatter_tensor(x.view, given.view, op)
            x.check(total.reshape(size, count)[rank], f"reduce_scatter_tensor premul_sum {name}")
            given.check_unchanged("reduce_scatter_tensor premul_sum")
            dist.reduce_scatter(x.view, list(given.view.reshape(size, count)), op, async_op=True).wait()
            x.check(total.reshape(size, count)[rank], f"reduce_scatter premul_sum {name}")


def test_each_rank_has_its_factor(world):
    world.run(scaled_sums)


def array_factors():
    rank, size = dist.get_rank(), dist.get_world_size()
    factor = np.array([1.0, 2.0, 0.5])
    x, op = np.full((2, 3), rank + 1.0), dist.premul_sum(factor)
    factor[...] = 100.0  # the call has its own
    dist.all_reduce(x, op)
    total = sum(range(1, size + 1))
    cases.same(x.tolist(), [[total, 2.0 * total, 0.5 * total]] * 2, "an array as the factor")
    x = np.ones(2)
    dist.all_reduce(x, "sum" if rank == 0 else dist.ReduceOp.PREMUL_SUM(3))
    cases.same(x.tolist(), [3.0 * size - 2] * 2, "a rank that passes SUM has factor 1")
    y = [np.ones(3), np.ones((2, 3))]
    dist.all_reduce_coalesced(y, dist.premul_sum(2))
    cases.same(y[1].tolist(), [[2.0 * size] * 3] * 2, "all_reduce_coalesced")


def test_an_array_as_the_factor(world):
    world.run(array_factors)


def refused():
    x, numbers = np.ones(3), np.ones(3, int)
    dist.all_reduce(np.ones(3), dist.premul_sum(2))
    wrong = [
        (ValueError, r"pass op=meshdist.premul_sum\(2.0\)", lambda: dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM)),
        (ValueError, r"pass op=meshdist.premul_sum\(2.0\)", lambda: dist.all_reduce(x, "premul_sum")),
        (TypeError, "cannot be multiplied", lambda: dist.all_reduce(numbers, dist.premul_sum(0.5))),
        (TypeError, "cannot be multiplied", lambda: dist.all_reduce(x, dist.premul_sum(1j))),
        (TypeError, "cannot be multiplied", lambda: dist.all_reduce(x > 0, dist.premul_sum(True))),
        (ValueError, "must broadcast", lambda: dist.all_reduce(x, dist.premul_sum([1.0, 2.0]))),
        (ValueError, "must broadcast", lambda: dist.all_reduce(x, dist.premul_sum(np.ones((2, 3))))),
        (TypeError, "factor must be", lambda: dist.premul_sum(object())),
        (TypeError, "factor must be", lambda: dist.premul_sum("2")),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()
    cases.same(x.tolist(), [1.0] * 3, "an array that was refused")


def test_what_is_refused(world):
    world.run(refused)


def test_reduce_op_is_the_deprecated_spelling():
    with pytest.warns(FutureWarning, match=r"use ReduceOp\.SUM"):
        assert dist.reduce_op.SUM is dist.ReduceOp.SUM
    with pytest.raises(AttributeError, match="SUM, PRODUCT, MIN and MAX, not AVG"):
        _ = dist.reduce_op.AVG
