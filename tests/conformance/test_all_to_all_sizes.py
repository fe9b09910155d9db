"""all_to_all whose sizes change from call to call, between some of the ranks, and across the borders of fast ways."""

import cases
import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
# Elements of 8 bytes from rank 1 to the last rank: short, too long together with others, long, and back.
SIZES = [1, 3, 1, 0, 4000, 5000, 1, 600_000, 2]


def exchange(size_of, salt):
    rank, size = dist.get_rank(), dist.get_world_size()
    give = [np.full(size_of(rank, peer), 100.0 * rank + peer + salt) for peer in range(size)]
    take = [np.full(size_of(peer, rank), -1.0) for peer in range(size)]
    dist.all_to_all(take, give)
    for peer in range(size):
        cases.same(take[peer].tolist(), [100.0 * peer + rank + salt] * size_of(peer, rank), f"from {peer}, {salt}")


def lists_whose_sizes_change():
    last = dist.get_world_size() - 1
    for salt, elements in enumerate(SIZES * 2):
        exchange(lambda giver, taker, n=elements: n if (giver, taker) == (1 % (last + 1), last) else 2, salt)


def test_lists_whose_sizes_change(world):
    world.run(lists_whose_sizes_change)


def rows_whose_sizes_change():
    rank, size = dist.get_rank(), dist.get_world_size()
    for salt, rows in enumerate(SIZES * 2):
        to = [[rows if (giver, taker) == (0, size - 1) else 1 for taker in range(size)] for giver in range(size)]
        come = [to[peer][rank] for peer in range(size)]
        give, take = np.full((sum(to[rank]), 1), float(rank + salt)), np.full((sum(come), 1), -1.0)
        dist.all_to_all_single(take, give, come, to[rank])
        cases.same(take.ravel().tolist(), [float(peer + salt) for peer in range(size) for _ in range(come[peer])], salt)


def test_rows_whose_sizes_change(world):
    world.run(rows_whose_sizes_change)


def rows_of_which_some_ranks_know_nothing(elements):
    """Only between ranks 1 and 2 do sizes change: rank 0 makes the same call all the time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for salt in range(12):
        to = np.full((size, size), elements)
        to[1 % size, 2 % size] -= salt % 2
        give, take = np.full(to[rank].sum(), 10.0 * salt + rank), np.full(to[:, rank].sum(), -1.0)
        dist.all_to_all_single(take, give, to[:, rank].tolist(), to[rank].tolist())
        due = np.repeat(10.0 * salt + np.arange(size), to[:, rank])
        assert np.array_equal(take, due), (salt, np.unique(take), np.unique(due))


@pytest.mark.parametrize("elements", [3, 3000, 100_000])
def test_sizes_between_others_change(world_of_several, elements):
    world_of_several.run(rows_of_which_some_ranks_know_nothing, elements)


def sizes_that_differ_after_a_call_that_agreed(elements):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
    give = [np.zeros(elements) for _ in range(size)]
    take = [np.zeros(elements) for _ in range(size)]
    group.all_to_all(take, give)
    if rank == 0:
        give[size - 1] = np.zeros(elements + 1)
    with pytest.raises(dist.DistBackendError, match=rf"rank 0 sends {elements + 1} elements to rank {size - 1}"):
        group.all_to_all(take, give)


@pytest.mark.parametrize("elements", [1, 100_000])
def test_all_raise_when_one_pair_disagrees(world_of_several, elements):
    world_of_several.run(sizes_that_differ_after_a_call_that_agreed, elements)
