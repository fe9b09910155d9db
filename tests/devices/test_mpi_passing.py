"""Arrays on a GPU, with a stand-in for CuPy, through MPI: staged, and passed on where MPI is said to take them.

What the stand-in has for the memory of a GPU is that of the host, so any MPI library can be handed it.
"""

import contextlib
import os

import device_programs as programs
import mpi_worlds
import numpy as np
import pytest
import standin_cupy
from standin_gpu import MACHINE

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
SEVERAL = [pair for pair in mpi_worlds.WORLDS if pair[1] > 1]


@pytest.fixture(params=SEVERAL, ids=[f"{backend}-{size}" for backend, size in SEVERAL])
def mpi_world(request, worlds):
    return worlds.world(*request.param)


@contextlib.contextmanager
def passing(wanted):
    os.environ["MESHDIST_MPI_CUDA"] = wanted
    try:
        yield
    finally:
        del os.environ["MESHDIST_MPI_CUDA"]


def every_call(wanted):
    with standin_cupy.installed() as cupy, passing(wanted), dist.new_group() as group:
        programs.every_collective(cupy, group, "float64", ((2, 3), (0,)), skipped=programs.OF_SEVERAL_GPUS)
        programs.every_collective(cupy, group, "bfloat16", ((4,),), strided=True, skipped=programs.OF_SEVERAL_GPUS)
        programs.every_op(cupy, group, "float32")
        programs.factors(cupy, group)
        assert MACHINE.races == []


@pytest.mark.parametrize("wanted", ["0", "1"], ids=["staged", "passed"])
@pytest.mark.slow
def test_every_call(mpi_world, wanted):
    mpi_world.run(every_call, wanted)


def count_copies(wanted):
    """Return how many copies between device and host a call takes, by the call; the second time, with its plan."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    with standin_cupy.installed() as cupy, passing(wanted), dist.new_group() as group:
        x, whole, wide = cupy.ones(4), cupy.zeros(4 * size), cupy.ones((4, 2))
        calls = {
            "all_reduce": lambda: group.all_reduce(x),
            "average": lambda: group.all_reduce(x, op="avg"),
            "min": lambda: group.all_reduce(x, op="min"),  # of floats: an operation of ours, in NumPy
            "broadcast": lambda: group.broadcast(x, group_src=0),
            "all_gather": lambda: group.all_gather_into_tensor(whole, x),
            "in place": lambda: group.all_gather_into_tensor(whole, whole[4 * rank : 4 * rank + 4]),
            "strided": lambda: group.all_reduce(wide[:, 0]),
            "async": lambda: group.all_reduce(x, async_op=True).wait(),
        }
        for name, call in calls.items():
            call()
            before = standin_cupy.num_copies()
            call()
            found[name] = standin_cupy.num_copies() - before
        group.all_gather_into_tensor(whole, x)
        np.testing.assert_array_equal(whole.get(), np.full(4 * size, x.get()[0]))
    return found


def test_what_is_passed_is_not_copied(mpi_world):
    for found in mpi_world.run(count_copies, "1"):
        passed = {name for name, count in found.items() if count == 0}
        assert passed == {"all_reduce", "average", "broadcast", "all_gather"}, found
    for found in mpi_world.run(count_copies, "0"):
        assert all(count > 0 for count in found.values()), found


def mixed():
    """Rank 0 has its array on the CPU, rank 1 passes its own on, the others stage theirs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with standin_cupy.installed() as cupy, passing("1" if rank == 1 else "0"), dist.new_group() as group:
        x = np.full(3, rank + 1.0) if rank == 0 else cupy.asarray(np.full(3, rank + 1.0))
        for _ in range(2):
            group.broadcast(group.all_reduce(x), group_src=1)
        return x.tolist() == [float(size * sum(range(1, size + 1)))] * 3


def said_by_the_library():
    from meshdist.backends.mpi.cuda_aware import is_cuda_aware
    from meshdist.backends.mpi.library import session

    return is_cuda_aware(session())


def test_libraries_without_cuda_say_so(mpi_world):
    assert set(mpi_world.run(said_by_the_library)) == {False}


def test_ranks_need_not_agree_where_their_arrays_are(mpi_world):
    assert all(mpi_world.run(mixed))
