"""More ranks than slots are made for, or than send to all at once: smaller slots, rounds, shares that do not divide."""

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
def test_every_collective_on_nine_ranks(worlds, backend):
    worlds.world(backend, SIZE).run(everything)
    if backend != "threads":
        worlds.drop(backend, SIZE)
