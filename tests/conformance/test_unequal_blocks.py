"""Gathers of blocks of unequal lengths, and scatters in which only the source knows the blocks."""

import itertools

import cases
import numpy as np
import pytest
from failing import fails
from test_functional import same
from test_trees import same as same_tree

import meshdist as dist
from meshdist import functional

pytestmark = pytest.mark.timeout(120)
DTYPES = ("float64", "int16", "bool", "complex64")


def block(rank, axis, dtype="float64"):
    """Return the array of a rank, with `rank` elements along `axis`: none on rank 0."""
    shape = [2, 3, 4]
    shape[axis] = rank
    return (np.arange(np.prod(shape)).reshape(shape) + rank).astype(dtype)


# ---- Gathers


def gathers():
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1
    for axis, dtype in itertools.product((0, 1, -1), DTYPES):
        blocks = [block(other, axis, dtype) for other in range(size)]
        x, whole = blocks[rank].copy(), np.concatenate(blocks, axis)
        same(functional.all_gather(x, axis=axis, uneven=True), whole, f"all_gather along {axis}")
        same(functional.all_gather(x, uneven=True), blocks, "all_gather")
        for names, expected in (({"axis": axis}, whole), ({"dim": axis}, whole), ({}, blocks)):
            found = functional.gather(x, root, **names, uneven=True)
            same(found, expected, f"gather, {names}") if rank == root else cases.same(found, None, "gather")
        same(x, blocks[rank], "the input")
    same(functional.all_gather(np.array(rank), axis=0, uneven=True), np.arange(size), "all_gather of numbers")
    strided = np.arange(2.0 * rank + 2)[::2]
    whole = np.concatenate([np.arange(2.0 * other + 2)[::2] for other in range(size)])
    same(functional.all_gather(strided, axis=0, uneven=True), whole, "all_gather of strided arrays")


def test_gathers(world):
    world.run(gathers)


def gathers_of_trees():
    rank, size = dist.get_rank(), dist.get_world_size()
    trees = [{"w": [np.full((other, 2), 1.5)], "n": other, "none": None} for other in range(size)]
    same_tree(functional.all_gather(trees[rank], uneven=True), trees, "all_gather")
    whole = {"w": [np.full((sum(range(size)), 2), 1.5)], "n": np.arange(size), "none": None}
    same_tree(functional.all_gather(trees[rank], axis=0, uneven=True), whole, "all_gather")
    same_tree(functional.gather(trees[rank], 0, axis=0, uneven=True), None if rank else whole, "gather")


def test_gathers_of_trees(world):
    world.run(gathers_of_trees)


def large_gather():
    rank, size = dist.get_rank(), dist.get_world_size()
    blocks = [np.arange(100_000.0 * other) for other in range(size)]
    same(functional.all_gather(blocks[rank], axis=0, uneven=True), np.concatenate(blocks), "all_gather")
    found = functional.gather(blocks[rank], axis=0, uneven=True)
    same(found, np.concatenate(blocks), "gather") if rank == 0 else cases.same(found, None, "gather")


def test_large_blocks(world):
    world.run(large_gather)


@pytest.mark.parametrize("call", [functional.all_gather, functional.gather])
def test_other_dimensions_must_agree(call):
    def main():
        x = np.zeros((dist.get_rank() + 1, 4 if dist.get_rank() == 2 else 3))
        words = "same shape on all ranks except in dimension 0", "rank 0 has (1, 3) and rank 2 has (3, 4)"
        fails(dist.DistBackendError, lambda: call(x, axis=0, uneven=True), *words)
        return len(functional.all_gather(x, uneven=True))  # the group is usable, and lists take any lengths

    assert dist.run(main, 3) == [3] * 3


@pytest.mark.parametrize("other", [np.zeros(2, np.float32), np.zeros((2, 2))], ids=["dtype", "ndim"])
def test_dtypes_and_numbers_of_dimensions_must_agree(other):
    def main():
        x = other if dist.get_rank() else np.zeros(2)
        fails(dist.DistBackendError, lambda: functional.all_gather(x, axis=0, uneven=True), "float64[:], uneven")

    dist.run(main, 2)


@pytest.mark.parametrize("call", [functional.all_gather, functional.gather])
def test_the_error_without_uneven_names_it(call):
    def main():
        x = np.zeros(dist.get_rank() + 1)
        fails(dist.DistBackendError, lambda: call(x, axis=0), f"functional.{call.__name__}(x, ", "axis=0, uneven=True)")

    dist.run(main, 2)


def test_dry_runs():
    with dist.dry_run(world_size=4, rank=1):
        assert functional.all_gather(np.ones((2, 3)), axis=1, uneven=True).shape == (2, 12)
        assert functional.gather(np.ones(2), 1, axis=0, uneven=True).shape == (8,)
        assert functional.gather(np.ones(2), axis=0, uneven=True) is None
        assert functional.scatter([1, 2, 3, 4], src=1) == 2
        assert functional.scatter(None, src=0) is None


# ---- Scatters


def scatters():
    rank, size = dist.get_rank(), dist.get_world_size()
    root, ranks = size - 1, range(size)
    is_root = rank == root
    for axis, dtype in itertools.product((0, 1, -1), DTYPES):
        blocks = [block(other, axis, dtype) for other in ranks]
        same(functional.scatter(blocks if is_root else None, src=root), blocks[rank], "scatter of unequal blocks")
        whole = np.arange(24 * size).reshape(2 * size, 3, 4).swapaxes(0, axis).astype(dtype)
        part = np.split(whole, size, axis)[rank].copy()
        same(functional.scatter(whole if is_root else None, src=root, axis=axis), part, f"scatter along {axis}")
        same(functional.scatter(None, whole if is_root else None, root, dim=axis), part, f"scatter along {axis}")
        same(whole, np.arange(24 * size).reshape(2 * size, 3, 4).swapaxes(0, axis).astype(dtype), "the input")
    trees = [{"w": [np.full(other, 1.5), np.array(2.5)], "n": other, "s": np.ones(3, "i2")} for other in ranks]
    same_tree(functional.scatter(trees if is_root else None, src=root), trees[rank], "scatter of trees")
    same_tree(functional.scatter([*ranks] if is_root else None, src=root), np.int64(rank), "scatter of numbers")
    whole = {"a": np.arange(2.0 * size), "b": [np.arange(size)]}
    part = {"a": np.arange(2.0 * rank, 2.0 * rank + 2), "b": [np.array([rank])]}
    same_tree(functional.scatter(whole if is_root else None, src=root, axis=0), part, "scatter of a tree")
    mixed = [None if other % 2 else np.zeros(other) for other in ranks]
    same_tree(functional.scatter(mixed if is_root else None, src=root), mixed[rank], "scatter of different trees")


def test_scatters(world):
    world.run(scatters)


def test_what_is_received_may_be_changed():
    def main():
        blocks = [np.zeros(2), np.zeros(2)] if dist.get_rank() == 0 else None
        x = functional.scatter(blocks)
        x += 1
        return x.tolist(), blocks is None or blocks[0].tolist()

    assert dist.run(main, 2) == [([1.0, 1.0], [0.0, 0.0]), ([1.0, 1.0], True)]


def test_a_scatter_on_an_axis_of_a_mesh():
    def main():
        row = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))["x"]
        x = [10 * dist.get_rank(), 10 * dist.get_rank() + 1] if row.get_local_rank() == 1 else None
        return int(functional.scatter(x, group=row, group_src=1))

    assert dist.run(main, 4) == [10, 11, 30, 31]


WRONG = {
    "array": (
        np.zeros(4),
        {},
        TypeError,
        "got an array of shape (4,); to split an array into equal blocks, pass axis=0",
    ),
    "nothing": (None, {}, TypeError, "x must be a list of 2 blocks, one for each rank, got NoneType"),
    "nothing to split": (None, {"axis": 0}, TypeError, "x must be an array or tree on the source, this rank, got None"),
    "too many": ([1, 2, 3], {}, ValueError, "x must hold 2 blocks, one for each rank, got 3"),
    "text": (["a", "b"], {}, TypeError, "x[0] must be an array, got str"),
    "does not divide": (np.zeros(5), {"axis": 0}, ValueError, "for blocks of unequal lengths, pass a list of them"),
    "no such axis": (np.zeros(4), {"axis": 1}, ValueError, "axis must be -1 to 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_blocks(name):
    x, how, kind, words = WRONG[name]

    def main():
        if dist.get_rank() == 0:
            fails(kind, lambda: functional.scatter(x, **how), words)
        dist.barrier()  # nothing was sent

    dist.run(main, 2)


def test_blocks_on_a_rank_that_is_not_the_source():
    def main():
        if dist.get_rank() == 1:
            words = "the blocks are for the source, rank 0 of the group; pass None on the others"
            fails(ValueError, lambda: functional.scatter([1, 2]), words)
            fails(ValueError, lambda: functional.scatter(None, [1, 2]), words)
        dist.barrier()

    dist.run(main, 2)


def test_a_whole_array_as_scatter_list_needs_an_axis():
    def main():
        fails(TypeError, lambda: functional.scatter(np.empty(2), np.zeros(2)), "equal blocks, pass axis=0")

    dist.run(main, 1)
