"""One rank of a world on several hosts, with RANK and its like in the environment: tries all there is."""

from __future__ import annotations

import sys

import numpy as np

import meshdist as dist

SIZES = (1, 1000, 100_001, 1 << 20)


def reductions(rank: int, size: int) -> None:
    ranks = np.arange(size)
    for count in SIZES:
        x = np.arange(count) % 7 + float(rank)
        total = np.arange(count) % 7 * size + ranks.sum()
        np.testing.assert_array_equal(dist.all_reduce(x.copy()), total)
        y = x.copy()
        dist.reduce(y, size - 1)
        np.testing.assert_array_equal(y, total if rank == size - 1 else x)
        out = np.empty(count)
        dist.reduce_scatter_tensor(out, np.concatenate([x + block for block in range(size)]))
        np.testing.assert_array_equal(out, total + rank * size)


def movements(rank: int, size: int) -> None:
    for count in SIZES:
        blocks = [np.arange(count) % 11 + float(each) for each in range(size)]
        for root in (0, size - 1):
            x = blocks[rank].copy()
            dist.broadcast(x, root)
            np.testing.assert_array_equal(x, blocks[root])
            dist.scatter(x, blocks if rank == root else None, root)
            np.testing.assert_array_equal(x, blocks[rank])
            gathered = [np.empty(count) for _ in range(size)] if rank == root else None
            dist.gather(blocks[rank], gathered, root)
            if gathered is not None:
                np.testing.assert_array_equal(gathered, blocks)
        everything = np.empty((size, count))
        dist.all_gather_into_tensor(everything, blocks[rank])
        np.testing.assert_array_equal(everything, blocks)
        dist.all_to_all_single(everything, np.stack([blocks[rank] + 100 * each for each in range(size)]))
        np.testing.assert_array_equal(everything, np.stack(blocks) + 100 * rank)
        dist.barrier()


def messages(rank: int, size: int) -> None:
    for count in SIZES:
        sent = [dist.isend(np.full(count, float(rank)), dst) for dst in range(size) if dst != rank]
        for _ in range(size - 1):
            x = np.empty(count)
            src = dist.recv(x)
            assert (x == src).all(), (rank, src, x[:3])
        for work in sent:
            work.wait()
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo", timeout=60)
    rank, size = dist.get_rank(), dist.get_world_size()
    for part in (reductions, movements, messages):
        part(rank, size)
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        assert dist.all_reduce(np.ones(3), group=group).tolist() == [2.0] * 3
    dist.destroy_process_group()
    print(f"rank {rank} of {size} is through")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
