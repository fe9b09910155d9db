"""Exchanges of long blocks by messages: whoever waits for one goes on writing what others wait for."""

import cases
import numpy as np
import pytest
from worlds import needs_linux

import meshdist as dist

pytestmark = [pytest.mark.timeout(120), needs_linux]
SIZE = 4


def exchange(num_bytes, partners):
    """Send a block to each of the ranks that are so far away, and nothing to the others."""
    rank = dist.get_rank()
    given = [
        np.full(num_bytes if (other - rank) % SIZE in partners else 0, 10 * rank + other, np.uint8)
        for other in range(SIZE)
    ]
    taken = [np.zeros(num_bytes if (rank - other) % SIZE in partners else 0, np.uint8) for other in range(SIZE)]
    for _ in range(2):
        dist.all_to_all(taken, given)
        for other, block in enumerate(taken):
            cases.same(np.unique(block).tolist(), [10 * other + rank] * bool(block.size), f"block of rank {other}")
            block[:] = 0


@pytest.mark.parametrize("backend", ["gloo-hosts", "gloo-hosts-slots"])
@pytest.mark.parametrize(
    ("num_bytes", "partners"),
    [(17 << 20, (2,)), (1 << 20, (1, 2, 3)), ((256 << 10) + 5000, (1, 2, 3))],
    ids=["the first one, and longer than goes through the ring", "longer than the ring", "a little longer"],
)
def test_ranks_of_two_hosts_exchange_long_blocks(worlds, backend, num_bytes, partners):
    worlds.drop(backend, SIZE)  # its ranks have not met, where that counts
    worlds.world(backend, SIZE).run(exchange, num_bytes, partners)
    worlds.drop(backend, SIZE)
