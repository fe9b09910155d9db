"""The documented example of an async collective, and what a request object can do."""

import numpy as np
import pytest
from documented import check, place

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


def reduce_then_add():
    # On the CPU there are no streams: what `wait` has returned from is done, so the page's "1 or 101" is 101 here.
    rank, _ = place()
    output = np.array([rank])
    handle = dist.all_reduce(output, async_op=True)
    handle.wait()
    output += 100
    return output.item(), handle.is_completed()


def test_result_may_be_used_after_wait(initialised):
    size = initialised.size
    check(initialised, reduce_then_add, [(sum(range(size)) + 100, True)] * size, {2: [(101, True)] * 2})


def future():
    rank, _ = place()
    handle = dist.all_reduce(np.array([rank + 1.0]), async_op=True)
    halved = handle.get_future().then(lambda done: float(np.sum(done.value())) / 2)
    return halved.wait(), handle.is_success()


def test_future_of_a_request(initialised):
    size = initialised.size
    check(initialised, future, [(size * (size + 1) / 4, True)] * size)


def every_collective():
    rank, size = place()
    x, blocks = np.array([rank]), [np.zeros(1, np.int64) for _ in range(size)]
    works = [
        dist.broadcast(np.array([rank]), 0, async_op=True),
        dist.reduce(np.array([rank]), 0, async_op=True),
        dist.all_gather(blocks, x, async_op=True),
        dist.all_gather_into_tensor(np.zeros(size, np.int64), x, async_op=True),
        dist.gather(x, blocks if rank == 0 else None, dst=0, async_op=True),
        dist.scatter(np.zeros(1, np.int64), blocks if rank == 0 else None, src=0, async_op=True),
        dist.reduce_scatter(np.zeros(1, np.int64), blocks, async_op=True),
        dist.reduce_scatter_tensor(np.zeros(1, np.int64), np.zeros(size, np.int64), async_op=True),
        dist.all_to_all(list(np.zeros((size, 1), np.int64)), blocks, async_op=True),
        dist.all_to_all_single(np.zeros(size, np.int64), np.zeros(size, np.int64), async_op=True),
        dist.barrier(async_op=True),
    ]
    return all(work.wait() for work in works) and all(work.is_completed() for work in works)


def test_every_collective_has_an_async_form(initialised):
    check(initialised, every_collective, [True] * initialised.size)
