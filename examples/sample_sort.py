"""Sort more numbers than one rank can hold, by parallel sorting with regular sampling.

    meshrun -n 4 examples/sample_sort.py --numbers 200000

Every rank sorts its own numbers and takes samples of them at regular distances. From the samples of all ranks, every
rank selects the same splitters, one fewer than ranks, and splits its numbers at them. One all_to_all sends the numbers
between two splitters to one rank. Rank 0 ends up with the smallest numbers, in order, and the last rank with the
largest. With samples at regular distances no rank gets more than twice its share, unless numbers repeat much.

Shi and Schaeffer, "Parallel sorting by regular sampling", 1992.
"""

import argparse
from time import perf_counter

import numpy as np

import meshdist as dist

Array = np.ndarray


def splitters(mine: Array) -> Array:
    """Return world_size - 1 numbers that split all ranks' numbers into parts of similar size.

    Args:
        mine: This rank's numbers, sorted.
    """
    size = dist.get_world_size()
    samples = mine[np.arange(size) * len(mine) // size]
    of_all = dist.all_gather_into_tensor(np.empty(size * size, mine.dtype), samples)
    return np.sort(of_all)[size // 2 + np.arange(1, size) * size - 1]


def exchange(parts: list[Array]) -> list[Array]:
    """Send part i to rank i; return the parts received from each rank."""
    lengths = np.array([len(part) for part in parts])
    to_come = dist.all_to_all_single(np.empty_like(lengths), lengths)
    received = [np.empty(length, parts[0].dtype) for length in to_come]
    dist.all_to_all(received, parts)
    return received


def sample_sort(numbers: Array) -> Array:
    """Return this rank's part of all ranks' numbers, sorted: none is larger than any of the next rank."""
    mine = np.sort(numbers)
    cuts = np.searchsorted(mine, splitters(mine))
    received = exchange(np.split(mine, cuts))
    return np.sort(np.concatenate(received), kind="stable")  # merges the sorted parts


def main() -> None:
    parser = argparse.ArgumentParser(description="Sort numbers that are shared out over ranks.")
    parser.add_argument("--numbers", type=int, default=50_000, help="of each rank (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.numbers < size:
        raise ValueError(f"--numbers must be at least the number of ranks, {size}, got {args.numbers}")
    # Each rank draws others, and most of them are small: with equal ranges one rank would get nearly all.
    numbers = np.random.default_rng(seed=rank).exponential(size=args.numbers)
    dist.barrier()
    began = perf_counter()
    mine = sample_sort(numbers)
    dist.barrier()
    seconds = perf_counter() - began

    ends = np.array([len(mine), mine[0] if len(mine) else np.nan, mine[-1] if len(mine) else np.nan])
    table = np.empty((size, 3)) if rank == 0 else None
    dist.gather(ends, list(table) if table is not None else None, dst=0)
    everything: list[Array | None] = [None] * size
    dist.gather_object((numbers, mine), everything if rank == 0 else None, dst=0)
    same = True
    if table is not None:
        for other, (count, smallest, largest) in enumerate(table):
            share = count / args.numbers
            print(
                f"rank {other}: {smallest:8.5f} to {largest:8.5f}  {'#' * round(20 * share)} {share:.0%} of its share"
            )
        before, after = (np.concatenate(arrays) for arrays in zip(*everything, strict=True))
        same = bool(np.array_equal(np.sort(before), after))
        print(f"{size * args.numbers} numbers in {seconds * 1e3:.1f} ms; sorted as np.sort does: {same}")
    dist.destroy_process_group()
    if not same:
        raise SystemExit("the numbers are not in order")


if __name__ == "__main__":
    main()
