"""The first message of a group and its first collective, at once, in two threads."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from worlds import VARIABLES, WorkerSet

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
# Longer than what is buffered: a message is done when it has been received.
COUNT, NUM_MESSAGES = 20_000, 8


def messages_during_the_first_collective():
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    total, taken = np.full(COUNT, rank), np.zeros((NUM_MESSAGES, COUNT))
    works = [dist.all_reduce(total, async_op=True)]
    works += [dist.isend(np.full(COUNT, 100.0 * number + rank), after) for number in range(NUM_MESSAGES)]
    works += [dist.irecv(row, before) for row in taken]
    for work in works:
        work.wait()
    wanted = [{100.0 * number + before} for number in range(NUM_MESSAGES)]
    return list(map(set, taken)) == wanted and set(total) == {sum(range(size))}


@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp", "gloo-hosts"])
def test_messages_during_the_first_collective(worlds, backend):
    for _ in range(4):
        # Fresh processes: what is loaded when it is first needed takes a while, which is when threads meet.
        with WorkerSet(worlds.nursery, 3, VARIABLES[backend], timeout_s=8.0) as workers:
            workers.join()
            workers.start(messages_during_the_first_collective)
            assert workers.gather() == [True] * 3
