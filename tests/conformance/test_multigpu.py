"""Processes with several arrays each: every array takes part."""

import cases
import numpy as np
import pytest
import reference
from cases import Placed, values

import meshdist as dist
from meshdist import ReduceOp

pytestmark = pytest.mark.timeout(120)
NUM_ARRAYS = 3


def of_all(shape, salt=0):
    """Arrays by rank and place."""
    ranks = range(dist.get_world_size())
    return [
        [values("float64", shape, NUM_ARRAYS * rank + place, salt) for place in range(NUM_ARRAYS)] for rank in ranks
    ]


def reductions():
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape, op in (((2, 3), ReduceOp.SUM), ((5,), ReduceOp.MAX), ((), ReduceOp.SUM), ((20_000,), ReduceOp.SUM)):
        lists = of_all(shape)
        total = reference.reduced([array for arrays in lists for array in arrays], op)
        placed = [Placed(array, "plain") for array in lists[rank]]
        dist.all_reduce_multigpu([array.view for array in placed], op)
        for array in placed:
            array.check(total, "all_reduce_multigpu")
        for root in range(size):
            placed = [Placed(array, "plain") for array in lists[rank]]
            dist.reduce_multigpu([array.view for array in placed], root, op, dst_tensor=1)
            for place, array in enumerate(placed):
                array.check(total if (rank, place) == (root, 1) else lists[rank][place], "reduce_multigpu")
    x = [np.full(2, 4.0 * rank + place) for place in range(2)]
    dist.all_reduce_multigpu(x, "avg")
    expected = np.mean([4.0 * other + place for other in range(size) for place in range(2)])
    assert np.allclose(x, expected)


def movements():
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in ((2, 3), (), (20_000,)):
        lists = of_all(shape)
        for root in range(size):
            placed = [Placed(array, "plain") for array in lists[rank]]
            dist.broadcast_multigpu([array.view for array in placed], root, src_tensor=2)
            for array in placed:
                array.check(lists[root][2], "broadcast_multigpu")
        everything = [array for arrays in lists for array in arrays]
        taken = [[np.zeros(shape) for _ in everything] for _ in range(NUM_ARRAYS)]
        assert dist.all_gather_multigpu(taken, lists[rank]) is taken
        for arrays in taken:
            for array, expected in zip(arrays, everything, strict=True):
                assert array.tobytes() == expected.tobytes()


def scattered():
    rank, size = dist.get_rank(), dist.get_world_size()
    places = size * NUM_ARRAYS
    for shape in ((4,), (), (3000,)):
        # By rank, list, place.
        inputs = [
            [[values("int64", shape, r * 7 + i, p) for p in range(places)] for i in range(NUM_ARRAYS)]
            for r in range(size)
        ]
        taken = [np.zeros(shape, int) for _ in range(NUM_ARRAYS)]
        assert dist.reduce_scatter_multigpu(taken, inputs[rank]) is taken
        for j, array in enumerate(taken):
            place = rank * NUM_ARRAYS + j
            expected = reference.reduced(
                [inputs[r][i][place] for r in range(size) for i in range(NUM_ARRAYS)], ReduceOp.SUM
            )
            assert array.tobytes() == expected.tobytes(), cases.where()


@pytest.mark.parametrize("program", [reductions, movements, scattered])
def test_multigpu(world, program):
    world.run(program)


def refused():
    x = [np.ones(2), np.ones(2)]
    with pytest.raises(ValueError, match="dst_tensor must be 0 to 1"):
        dist.reduce_multigpu(x, 0, dst_tensor=2)
    with pytest.raises(ValueError, match="src_tensor must be 0 to 1"):
        dist.broadcast_multigpu(x, 0, src_tensor=-1)
    with pytest.raises(ValueError, match="must have the shape"):
        dist.all_reduce_multigpu([np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="must hold 2 lists"):
        dist.all_gather_multigpu([x], x)


def test_what_is_refused(world):
    world.run(refused)
