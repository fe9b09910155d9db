"""k-means with the points distributed over the ranks and the centres replicated.

    meshrun -n 4 examples/kmeans.py

The points are the 1,797 handwritten digits of 8 x 8 pixels. Each step assigns this rank's points to their nearest
centres, sums them by centre, and reduces the sums and counts over all ranks: one all_reduce, whose size depends on the
number of centres and not on that of points. The pixels and their sums are integers, so the result is equal to the last
bit for any number of ranks.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

import meshdist as dist

Array = np.ndarray
PIXELS = 64


def nearest(points: Array, centres: Array) -> tuple[Array, Array]:
    """Return the centre that is nearest to each point, and the square of the distance."""
    squares = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2)
    return squares.argmin(axis=1), squares.min(axis=1)


def sums_by_centre(points: Array, labels: Array, k: int) -> Array:
    """Return for each centre the sum of its points and, last, their number: (k, PIXELS + 1)."""
    sums = np.zeros((k, PIXELS + 1), np.int64)
    np.add.at(sums, labels, np.column_stack([points, np.ones(len(points), np.int64)]))
    return sums


def k_means(
    points: Array, first: Array, steps: int, sum_over_ranks: Callable[[Array], Array]
) -> tuple[Array, list[int]]:
    """Move the centres, from `first`, until they are stable; return them, and how many points moved.

    Args:
        points: Those of this rank (any, PIXELS).
        first: The first centres (k, PIXELS), the same on all ranks.
        steps: At most so many.
        sum_over_ranks: Sums an array over all ranks.
    """
    centres, labels, moved = first.astype(float), np.full(len(points), -1), []
    for _ in range(steps):
        new, _ = nearest(points, centres)
        sums = sums_by_centre(points, new, len(centres))
        flat = sum_over_ranks(np.append(sums.ravel(), np.count_nonzero(new != labels)))
        sums, labels = flat[:-1].reshape(sums.shape), new
        moved.append(int(flat[-1]))
        if moved[-1] == 0:
            break
        has_points = sums[:, -1] > 0  # a centre without points stays where it is
        centres[has_points] = sums[has_points, :-1] / sums[has_points, -1:]
    return centres, moved


def picture(centres: Array) -> str:
    """Return the centres as pictures next to each other."""
    shades = np.array(list(" .:-=+*#%@"))[np.rint(centres * 9 / 16).astype(int)].reshape(-1, 8, 8)
    return "\n".join("  ".join("".join(row) for row in shades[:, line]) for line in range(8))


def main() -> None:
    parser = argparse.ArgumentParser(description="Find clusters among handwritten digits.")
    parser.add_argument("--k", type=int, default=10, help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="at most (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    with np.load(Path(__file__).parent / "data" / "digits.npz") as digits:
        points, classes = digits["images"].reshape(-1, PIXELS).astype(np.int64), digits["labels"]
    mine = np.array_split(np.arange(len(points)), size)[rank]
    first = np.empty((args.k, PIXELS), np.int64)
    if rank == 0:
        first[:] = points[np.random.default_rng(seed=1).choice(len(points), args.k, replace=False)]
    dist.broadcast(first, src=0)

    centres, moved = k_means(points[mine], first, args.steps, dist.all_reduce)

    labels, squares = nearest(points[mine], centres)
    error = dist.all_reduce(np.array(squares.sum())).item()
    found = np.zeros((args.k, 10), np.int64)  # how many of each digit are in each cluster
    np.add.at(found, (labels, classes[mine]), 1)
    dist.all_reduce(found)
    same = True
    if rank == 0:
        alone, moved_alone = k_means(points, first, args.steps, lambda array: array)
        same = bool(np.array_equal(alone, centres)) and moved == moved_alone
        best = found.argmax(axis=1)
        order = np.argsort(best, kind="stable")[:8]
        print(picture(centres[order]))
        print("  ".join(f"  {best[k]}: {found[k].max() / max(found[k].sum(), 1):3.0%}" for k in order))
        print(f"{args.k} centres after {len(moved)} steps on {size} ranks; points that moved: {moved}")
        print(
            f"{found.max(axis=1).sum() / len(points):.1%} of the points are of their cluster's digit; error {error:.0f}"
        )
        print(f"bit for bit what one process finds: {same}")
    dist.destroy_process_group()
    if not same:
        raise SystemExit("the centres are wrong")


if __name__ == "__main__":
    main()
