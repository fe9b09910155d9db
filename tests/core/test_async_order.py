"""Async calls: thousands of them, the order per group, works that nobody keeps, and the caller's own computing."""

import time

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)


def thousands(count):
    size, rank = dist.get_world_size(), dist.get_rank()
    arrays = [np.array([rank + number, 1]) for number in range(count)]
    works = [dist.all_reduce(array, async_op=True) for array in arrays]
    for work in works:
        assert work.wait() is True
    for number, array in enumerate(arrays):
        assert array.tolist() == [sum(range(size)) + size * number, size]


def test_thousands_in_flight(world_of_3):
    world_of_3.run(thousands, 500 if world_of_3.backend == "threads" else 5_000)


def mixed_kinds():
    # Each call needs the one before it: only the order in which they were made gives these values.
    size, rank = dist.get_world_size(), dist.get_rank()
    x, rows = np.array([float(rank)]), np.zeros(size)
    for step in range(30):
        root = step % size
        dist.broadcast(x, root, async_op=True)
        dist.all_reduce(x, async_op=True)
        dist.all_gather_into_tensor(rows, x, async_op=step % 2 == 0)
        x /= size if step % 2 else 1
    dist.barrier()
    assert set(rows.tolist()) == {0.0}


def test_kinds_of_calls_keep_their_order(world_of_3):
    world_of_3.run(mixed_kinds)


def nobody_keeps_the_works():
    size = dist.get_world_size()
    x = np.ones(2)
    for _ in range(10):
        dist.all_reduce(x, async_op=True)
    group = dist.new_group()
    y = np.ones(50_000)
    group.all_reduce(y, async_op=True)
    dist.destroy_process_group(group)  # drains it
    assert set(y.tolist()) == {float(size)}
    dist.barrier()
    assert x.tolist() == [float(size) ** 10] * 2


def test_works_that_nobody_keeps_are_carried_out(world_of_3):
    world_of_3.run(nobody_keeps_the_works)


def sync_right_after_wait():
    # wait returns when the call has left its queue: what follows must not meet it.
    x = np.ones(1)
    for _ in range(300):
        dist.all_reduce(x, "max", async_op=True).wait()
        dist.all_reduce(x, "max")
    assert x.item() == 1.0


def test_sync_calls_right_after_wait(world_of_3):
    world_of_3.run(sync_right_after_wait)


def while_the_caller_computes():
    # The call is carried out while this thread computes without pause, and never waits.
    x = np.ones(1 << 16)
    dist.all_reduce(x.copy())
    work = dist.all_reduce(x, async_op=True)
    end, steps = time.monotonic() + 20.0, 0
    while not work.is_completed() and time.monotonic() < end:
        steps += 1
    assert work.is_success()
    assert set(x.tolist()) == {float(dist.get_world_size())}


def test_calls_go_on_while_the_caller_computes(world_of_3):
    world_of_3.run(while_the_caller_computes)
