"""Solve the heat equation of heat_2d.py with arrays over a mesh: `step` is all there is of a solver.

    meshrun -n 4 examples/heat_2d_arrays.py --cells 96 --steps 400

The plate with its boundary is one array, sharded along both axes of the mesh in blocks of any sizes. `map_overlap`
calls `step` on each rank's block, framed by one row of its neighbours' cells; at the boundary of the plate there is no
neighbour, and the outermost cells keep their temperature. Each cell is computed from the same numbers in the same
order as in one process.
"""

import argparse
import math
import sys

import numpy as np
from heat_2d import DIFFUSION, Array, picture, plate
from tqdm import tqdm

import meshdist as dist
from meshdist.tensor import Shard, distribute_tensor, map_overlap


def step(u: Array) -> Array:
    """Return the temperatures after one step; the outermost cells keep theirs."""
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    new = u.copy()
    new[1:-1, 1:-1] += DIFFUSION * (around - 4 * u[1:-1, 1:-1])
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description="Let heat flow through a plate that is an array over a mesh.")
    parser.add_argument("--cells", type=int, default=48, help="of the plate, each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="(default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    size = dist.get_world_size()
    rows = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    mesh = dist.init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("y", "x"))
    is_first = mesh.get_rank() == 0

    first = plate(args.cells) if is_first else None
    u = distribute_tensor(first, mesh, {"y": Shard(0), "x": Shard(1)})
    for _ in tqdm(range(args.steps), unit="step", disable=not (is_first and sys.stderr.isatty())):
        u = map_overlap(step, u, 1)
    warmth = float(u[1:-1, 1:-1].mean())
    whole = u.full(root=0)

    same = True
    if first is not None:
        u.show("text")
        for _ in range(args.steps):
            first = step(first)
        same = bool(np.array_equal(whole, first))
        print(picture(whole))
        print(f"after {args.steps} steps on a mesh of {rows} x {size // rows}: {warmth:.4f} on average")
        print(f"bit for bit what one process computes: {same}")
    dist.destroy_process_group()
    if not same:
        raise SystemExit("the temperatures are wrong")


if __name__ == "__main__":
    main()
