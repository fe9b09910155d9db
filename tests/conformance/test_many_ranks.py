"""More ranks than slots are made for, or than send to all others directly: smaller slots, rounds, uneven shares."""

import cases
import numpy as np
import pytest
from cases import values
from mpi_worlds import RUNS_ALL

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
SIZE = 9


def everything():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 7, 100, 5_000, 70_001):
        mine = [values("int64", (size, count), other) for other in range(size)]
        x = dist.all_reduce(mine[rank].copy())
        equal(x, sum(mine), f"all_reduce of {x.size}")
        equal(dist.reduce(mine[rank].copy(), 4), sum(mine) if rank == 4 else mine[rank], f"reduce of {x.size}")
        equal(dist.broadcast(mine[rank].copy(), 7), mine[7], f"broadcast of {x.size}")
        out = dist.all_gather_into_tensor(np.zeros((size, count), int), mine[rank][0])
        equal(out, np.stack([array[0] for array in mine]), f"all_gather_into_tensor of {count}")
        out = dist.reduce_scatter_tensor(np.zeros(count, int), mine[rank])
        equal(out, sum(mine)[rank], f"reduce_scatter_tensor of {count}")
        out = dist.all_to_all_single(np.zeros_like(mine[rank]), mine[rank])
        equal(out, np.stack([array[rank] for array in mine]), f"all_to_all_single of {count}")
        dist.barrier()


def equal(actual, expected, what):
    if not np.array_equal(actual, expected):
        raise AssertionError(f"{cases.where()}, {what}: got {actual}, expected {expected}")


@pytest.mark.parametrize(
    "backend",
    ["threads", *(f"gloo{way}" for way in ("", "-slots", "-tcp")), *(["mpi-mpich"] if RUNS_ALL else [])],
)
@pytest.mark.slow
def test_every_collective_on_nine_ranks(worlds, backend):
    worlds.world(backend, SIZE).run(everything)
    if backend != "threads":
        worlds.drop(backend, SIZE)


def sum_beside(count):
    """Return the bits of a sum whose order matters, sent with others."""
    x = np.full(count, (2.0**24, 1, 1, -(2.0**24), 1, 1, 1, 3, 1)[dist.get_rank()], np.float32)
    return dist.all_reduce(x)[0].tobytes()


@pytest.mark.parametrize("backend", ["gloo", "gloo-slots"])
def test_on_one_host_a_sum_has_the_same_bits_whatever_it_is_sent_with(worlds, backend):
    world = worlds.world(backend, SIZE)
    sums = {bits for count in (1, 2, 3000, 5000, 70_001) for bits in world.run(sum_beside, count)}
    worlds.drop(backend, SIZE)
    assert len(sums) == 1


def sum_of_many_bytes():
    rank, size = dist.get_rank(), dist.get_world_size()
    count = (8 << 20) // 8 + 3
    total = dist.all_reduce(np.arange(count) * (rank + 1))
    equal(total, np.arange(count) * sum(range(1, size + 1)), f"all_reduce of {count}")
    mean = dist.all_reduce(np.full(count, float(rank)), "avg")
    equal(mean, np.full(count, (size - 1) / 2), f"mean of {count}")


def test_sixteen_ranks_reduce_many_bytes(worlds):
    worlds.world("gloo", 16).run(sum_of_many_bytes)
    worlds.drop("gloo", 16)
