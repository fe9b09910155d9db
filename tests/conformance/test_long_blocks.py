"""Movements of blocks that are longer than what goes through a backend's buffers: each has a way of its own."""

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20


def block(num_bytes, salt):
    """Return an array of so many bytes whose elements tell where they are, and of whom."""
    return np.arange(num_bytes // 8, dtype=np.int64) * 7 + salt * 1_000_003


def same(actual, expected, what):
    # No report of a million elements.
    assert np.array_equal(actual, expected), f"{what} on rank {dist.get_rank()}"


def to_all_of_one_block():
    rank, size = dist.get_rank(), dist.get_world_size()
    last, num_bytes = size - 1, 16 * MIB + 8
    x = block(num_bytes, 1) if rank == last else np.zeros(num_bytes // 8, np.int64)
    dist.broadcast(x, last)
    same(x, block(num_bytes, 1), "broadcast")
    blocks = [np.zeros(num_bytes // 8, np.int64) for _ in range(size)] if rank == 0 else None
    dist.gather(block(num_bytes, rank), blocks, 0)
    for peer, found in enumerate(blocks or ()):
        same(found, block(num_bytes, peer), f"gather from {peer}")


def to_each_another_block():
    rank, size = dist.get_rank(), dist.get_world_size()
    num_bytes = (8 * MIB // size**3 // 8 + 1) * 8
    x = np.zeros(num_bytes // 8, np.int64)
    dist.scatter(x, [block(num_bytes, peer) for peer in range(size)] if rank == 0 else None, 0)
    same(x, block(num_bytes, rank), "scatter")
    num_bytes = (64 * MIB // size**3 // 8 + 1) * 8
    outputs = [np.zeros(num_bytes // 8 + peer, np.int64) for peer in range(size)]
    dist.all_to_all(outputs, [block(num_bytes + 8 * rank, size * rank + peer) for peer in range(size)])
    for peer, found in enumerate(outputs):
        same(found, block(num_bytes + 8 * peer, size * peer + rank), f"all_to_all from {peer}")


@pytest.mark.parametrize("program", [to_all_of_one_block, to_each_another_block])
def test_long_blocks(world, program):
    world.run(program)
