"""Exchanges whose sizes change from call to call, as those of tokens and particles do."""

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
# The longest block, in elements: through the slots, or copied between the arrays; in one call both may be there.
LONGEST = [0, 3, 700, 30_000, 5, 200_000]


def rows_of_call(number, size):
    """Return how many rows each rank sends to each, the same on all ranks."""
    rng = np.random.default_rng(number)
    return rng.integers(0, LONGEST[number % len(LONGEST)] + 1, (size, size))


def exchange(number, call):
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = rows_of_call(number, size)
    given = [np.full((count, 2), 100 * rank + peer, np.int32) for peer, count in enumerate(rows[rank])]
    taken = call(given, rows[rank].tolist(), rows[:, rank].tolist())
    for peer, block in enumerate(taken):
        assert block.shape == (rows[peer, rank], 2)
        assert (block == 100 * peer + rank).all()


def single(given, to, come):
    taken = np.zeros((sum(come), 2), np.int32)
    dist.all_to_all_single(taken, np.concatenate(given), come, to)
    return np.split(taken, np.cumsum(come)[:-1])


def single_async(given, to, come):
    taken = np.zeros((sum(come), 2), np.int32)
    dist.all_to_all_single(taken, np.concatenate(given), come, to, async_op=True).wait()
    return np.split(taken, np.cumsum(come)[:-1])


def lists(given, to, come):
    taken = [np.zeros((count, 2), np.int32) for count in come]
    dist.all_to_all(taken, given)
    return taken


def exchange_often(name):
    for number in range(4 * len(LONGEST)):
        for _ in range(1 + number % 3):  # sizes that come again, too
            exchange(number, globals()[name])


@pytest.mark.parametrize("name", ["single", "single_async", "lists"])
@pytest.mark.parametrize("size", [2, 3])
def test_each_call_has_its_own_sizes(worlds, size, name):
    worlds.world("gloo", size).run(exchange_often, name)
