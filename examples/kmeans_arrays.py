"""k-means of kmeans.py with arrays over a mesh: the points are sharded, the centres replicated.

    meshrun -n 4 examples/kmeans_arrays.py

`k_means` is NumPy for the whole arrays, and runs with them as well: that is how the result is checked. The sums over
the points are pending until the division by the number of points computes them. The pixels and their sums are
integers, so the result is equal to the last bit for any number of ranks.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from kmeans import PIXELS, picture

import meshdist as dist
from meshdist.tensor import Shard, distribute_tensor


def k_means(points: Any, centres: Any, steps: int) -> tuple[Any, int]:
    """Move the centres until they are stable; return them, and the number of steps.

    Args:
        points: Shape (n, PIXELS), NumPy's or sharded by rows.
        centres: The first ones, shape (k, PIXELS), NumPy's or replicated.
        steps: At most so many.
    """
    for step in range(1, steps + 1):
        squares = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2)
        is_of = squares.argmin(axis=1)[:, None] == np.arange(len(centres))  # (n, k)
        counts = is_of.sum(axis=0)[:, None]
        sums = is_of.T.astype(int) @ points
        new = np.where(counts > 0, sums / np.maximum(counts, 1), centres)  # one without points stays where it is
        if (new == centres).all():
            return centres, step
        centres = new
    return centres, steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Find clusters among handwritten digits.")
    parser.add_argument("--k", type=int, default=10, help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="at most (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with np.load(Path(__file__).parent / "data" / "digits.npz") as digits:
        pixels = digits["images"].reshape(-1, PIXELS).astype(int)
    first = pixels[np.random.default_rng(seed=1).choice(len(pixels), args.k, replace=False)].astype(float)

    points = distribute_tensor(pixels, mesh, {"dp": Shard(0)}, src_data_rank=None)
    centres, steps = k_means(points, distribute_tensor(first, mesh, {}, src_data_rank=None), args.steps)
    found = centres.full()

    same = True
    if mesh.get_rank() == 0:
        alone, steps_alone = k_means(pixels, first, args.steps)
        same = bool(np.array_equal(alone, found)) and steps == steps_alone
        points.show("text")
        print(picture(found[:8]))
        print(f"{args.k} centres after {steps} steps on {mesh.size()} ranks")
        print(f"bit for bit what one process finds: {same}")
    dist.destroy_process_group()
    if not same:
        raise SystemExit("the centres are wrong")


if __name__ == "__main__":
    main()
