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
    reduced = functional.reduce(x.view, root)
    same(reduced, total, "reduce") if rank == root else cases.same(reduced, None, "reduce")
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


def along(axis, layout):
    rank, size = dist.get_rank(), dist.get_world_size()
    arrays = [values("float32", (2 * size, size, 3 * size), other) for other in range(size)]
    x, place = Placed(arrays[rank], layout), axis % 3
    whole, cut = np.concatenate(arrays, place), [np.split(array, size, place) for array in arrays]
    for names in ({"axis": axis}, {"dim": axis}):
        same(functional.all_gather_into_tensor(x.view, **names), whole, "all_gather_into_tensor")
        same(functional.all_gather(x.view, **names), whole, "all_gather")
        gathered = functional.gather(x.view, size - 1, **names)
        same(gathered, whole, "gather") if rank == size - 1 else cases.same(gathered, None, "gather")
        total = np.split(reference.reduced(arrays, ReduceOp.MAX), size, place)[rank].copy()
        same(functional.reduce_scatter_tensor(x.view, "max", **names), total, "reduce_scatter_tensor")
        same(functional.reduce_scatter(x.view, "max", **names), total, "reduce_scatter")
        exchanged = np.concatenate([parts[rank] for parts in cut], place)
        same(functional.all_to_all_single(x.view, **names), exchanged, "all_to_all_single")
        same(functional.all_to_all(x.view, **names), exchanged, "all_to_all")
        given = x.view if rank == 0 else None
        same(functional.scatter(cut[rank][0], given, 0, **names), cut[0][rank].copy(), "scatter")
    # Rank k gets k + 1 of each array, and the last one the rest.
    lengths = [*range(1, size), x.view.shape[place] - sum(range(1, size))]
    parts = [np.split(array, np.cumsum(lengths)[:-1], place)[rank] for array in arrays]
    found = functional.all_to_all_single(x.view, [lengths[rank]] * size, lengths, axis=axis)
    same(found, np.concatenate(parts, place), "all_to_all_single with split sizes")
    x.check_unchanged("functional forms")


@pytest.mark.parametrize("axis", [1, -1, 0])
def test_along_a_dimension(world_of_3, axis):
    world_of_3.run(along, axis, "transposed")


def test_numbers_and_one_rank_along_a_dimension():
    for axis in range(3):
        dist.run(along, 1, (axis, "plain"))

    def main():
        rank = dist.get_rank()
        same(functional.all_gather(np.array(rank), axis=0), np.arange(2), "0-d")
        same(
            functional.scatter(np.array(0), np.arange(4, 6) if rank == 0 else None, 0, axis=-1), np.array(4 + rank), ""
        )

    dist.run(main, 2)


X = np.zeros((4, 6))
WRONG = {
    "both": (lambda: functional.all_gather(X, axis=0, dim=0), ValueError, "pass axis or dim"),
    "too high": (
        lambda: functional.all_gather_into_tensor(X, axis=2),
        ValueError,
        r"all_gather_into_tensor on group 'world' .*axis must be -2 to 1 for an array of shape \(4, 6\), got 2",
    ),
    "too low": (lambda: functional.gather(X, 0, dim=-3), ValueError, "gather on group .*dim must be -2 to 1.*got -3"),
    "text": (lambda: functional.all_to_all_single(X, axis="x"), TypeError, "axis must be an integer, got 'x'"),
    "uneven": (
        lambda: functional.reduce_scatter_tensor(np.zeros((4, 5)), axis=1),
        ValueError,
        r"dim 1 of x must be a multiple of 2 ranks, got \(4, 5\)",
    ),
    "uneven list": (
        lambda: functional.all_to_all(np.zeros((4, 5)), dim=1),
        ValueError,
        r"all_to_all on group .*, got \(4, 5",
    ),
    "0-d": (lambda: functional.reduce_scatter_tensor(np.array(1)), ValueError, "dim 0 of x must be a multiple"),
    "uneven exchange": (lambda: functional.all_to_all_single(np.zeros((4, 5)), axis=1), ValueError, "5"),
    "scatter": (
        lambda: functional.scatter(X, X, dist.get_rank(), axis=1),
        ValueError,
        r"scatter_list must have shape \(4, 12\), 2 blocks of the shape of x along dimension 1, got \(4, 6\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_dimensions(name):
    call, kind, words = WRONG[name]

    def main():
        with pytest.raises(kind, match=words):
            call()
        dist.barrier()

    dist.run(main, 2)
