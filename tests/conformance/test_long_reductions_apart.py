"""functional.all_reduce, and Partial to Replicate, of arrays that are long enough to be reduced into another array."""

import numpy as np
import pytest

import meshdist as dist
from meshdist import functional

pytestmark = pytest.mark.timeout(120)
ELEMENTS = (5 << 20) // 8 + 3
# How the array of a rank lies in memory.
KINDS = {
    "plain": lambda values: values,
    "strided": lambda values: np.stack([values, values], axis=1)[:, 1],
    "read-only": lambda values: np.frombuffer(values.tobytes(), values.dtype),
    "shared": lambda values: shared(values),
    "shared on one rank": lambda values: shared(values) if dist.get_rank() == 0 else values,
}


def shared(values):
    array = dist.empty(values.shape, values.dtype)
    array[...] = values
    return array


def reduced_apart(kind, dtype, op):
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [(np.arange(ELEMENTS) % 5 + other + 1).astype(dtype) for other in range(size)]
    combine = {"sum": np.add, "max": np.maximum, "avg": np.add}[op]
    wanted = values[0]
    for other in values[1:]:
        wanted = combine(wanted, other)
    if op == "avg":
        wanted = wanted / dtype(size)
    x = KINDS[kind](values[rank])
    for turn in range(9):  # the first ones try several ways
        if turn == 5 and rank == 0:
            y = values[0].copy()
            dist.all_reduce(y, op)  # in place here, and not on the other ranks
        else:
            y = functional.all_reduce(x, op)
        assert np.array_equal(x, values[rank]), (turn, "changed")
        assert y.dtype == wanted.dtype, y.dtype
        assert np.array_equal(y, wanted), (turn, np.flatnonzero(y != wanted)[:3])


@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-slots", "gloo-tcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_input_is_not_changed(worlds, backend, kind):
    worlds.world(backend, 3).run(reduced_apart, kind, np.float64, "sum")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "op"), [(np.float32, "avg"), (np.int64, "max"), (np.complex128, "sum")])
def test_dtypes_and_reductions(worlds, num_ranks, dtype, op):
    worlds.world("gloo", num_ranks).run(reduced_apart, "plain", dtype, op)
