"""What backend mpi adds to the conformance suite: errors of MPI, calls that disagree, large arrays, many groups."""

import os
import time

import mpi_worlds
import numpy as np
import pytest

import meshdist as dist
from meshdist.backends.mpi.library import session

pytestmark = pytest.mark.timeout(120)


SEVERAL = [pair for pair in mpi_worlds.WORLDS if pair[1] > 1]


@pytest.fixture(params=SEVERAL, ids=[f"{backend}-{size}" for backend, size in SEVERAL])
def mpi_world(request, worlds):
    return worlds.world(*request.param)


def disagreeing(asynchronous):
    rank, group = dist.get_rank(), dist.new_group()
    for count in (4, 4 + rank):
        x = np.zeros(count)
        try:
            group.all_reduce(x, async_op=True).wait(20) if asynchronous else group.all_reduce(x)
        except dist.DistBackendError as error:
            assert count == 4 + rank
            text = str(error)
    for other in range(dist.get_world_size()):
        assert f"rank {other} calls all_reduce(float64[{4 + other}], op=sum)" in text, text
    assert "all_reduce on group" in text
    with pytest.raises(dist.DistBackendError, match="cannot be used after an earlier failure"):
        group.barrier()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_calls_that_disagree_are_an_error_on_all_ranks(mpi_world, asynchronous):
    mpi_world.run(disagreeing, asynchronous)


def sync_here_async_there():
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(50):
        x = np.full(100, float(rank + step))
        if (rank + step) % 2:
            dist.all_reduce(x)
        else:
            dist.all_reduce(x, async_op=True).wait(20)
        assert (x == sum(range(size)) + size * step).all()


def test_sync_calls_meet_async_ones(mpi_world):
    mpi_world.run(sync_here_async_there)


def in_words_of_mpi():
    mine = session()
    error = mine.error(mine.mpi.Exception(mine.mpi.ERR_RANK))
    assert isinstance(error, dist.DistBackendError)
    assert str(error).startswith("MPI says: ")
    assert "rank" in str(error)


def test_errors_of_mpi_say_what_mpi_says(mpi_world):
    mpi_world.run(in_words_of_mpi)


def many_groups(count):
    # All used for the first time at once, in a different order on each rank, and given back.
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(count)]
    works = {}
    for number in sorted(range(count), key=lambda number: (number * 7 * (rank + 1)) % count):
        works[number] = groups[number].all_reduce(np.array([float(number)]), async_op=True)
    for number, work in works.items():
        assert work.result()[0] == size * number
    for group in groups:
        dist.destroy_process_group(group)


def test_many_groups_at_once(mpi_world):
    for _ in range(2):
        mpi_world.run(many_groups, 20)


def groups_come_and_go():
    for _ in range(100):
        with dist.new_group() as group:
            assert group.all_reduce(np.ones(1))[0] == dist.get_world_size()


def test_groups_are_given_back(mpi_world):
    mpi_world.run(groups_come_and_go)


def closed_beside_a_message(num_bytes):
    # A message that nobody has asked for yet, in another group, does not keep this one from being closed.
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.isend(np.ones(num_bytes, np.uint8), size - 1)
    begin = time.monotonic()
    with dist.new_group() as group:
        group.barrier()
    assert time.monotonic() - begin < 4
    if rank == size - 1:
        dist.recv(np.zeros(num_bytes, np.uint8), 0)


def test_a_group_is_closed_beside_a_message_of_another(mpi_world):
    mpi_world.run(closed_beside_a_message, 60_000)


def subgroups_only_of_members():
    # Nobody else does anything for them.
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    if rank in (0, last):
        group = dist.new_group([last, 0], sort_ranks=False)
        out = np.zeros((2, 1))
        group.all_gather_into_tensor(out, np.array([float(rank)]))
        assert out.tolist() == [[last], [0.0]]


def test_a_group_needs_its_members_only(mpi_world):
    mpi_world.run(subgroups_only_of_members)


def late(seconds):
    group, rank = dist.new_group(timeout=seconds), dist.get_rank()
    group.barrier()
    if rank:
        for call in (lambda: group.all_reduce(np.ones(3)), lambda: group.recv(np.ones(1), 0)):
            with pytest.raises(
                dist.DistError, match="timed out after 0.4 s waiting for rank 0|failed: |after an earlier failure"
            ):
                call()


def test_who_does_not_come_is_waited_for_no_longer_than_said(mpi_world):
    mpi_world.run(late, 0.4)


def beyond_32_bits(num_bytes):
    rank, size = dist.get_rank(), dist.get_world_size()
    places = [0, (1 << 31) - 1, 1 << 31, num_bytes - 1]
    x = np.zeros(num_bytes, np.uint8)
    x[places] = 1 + rank
    dist.broadcast(x, 1)
    assert x[places].tolist() == [2] * 4
    assert not x[1 : 1 << 20].any()
    x[places] = 1 + rank
    dist.all_reduce(x)
    assert x[places].tolist() == [size * (size + 1) // 2] * 4


@pytest.mark.skipif(not mpi_worlds.RUNS_ALL, reason="takes long: runs with MESHDIST_MPI_WORLDS=all")
@pytest.mark.parametrize("backend", ["mpi-openmpi", "mpi-mpich"])
def test_collectives_over_2_gib(worlds, backend):
    num_bytes = (1 << 31) + 4096
    needed, free = 5 * num_bytes, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < needed:
        pytest.skip(f"needs {needed >> 20} MiB of free memory, there are {free >> 20}")
    worlds.world(backend, 2).run(beyond_32_bits, num_bytes)
