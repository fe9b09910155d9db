"""Solve the heat equation on a plate that is split along both axes of a mesh, with halo exchange.

    meshrun -n 4 examples/heat_2d.py --cells 96 --steps 400

Each rank has a part of the plate, framed by one row of cells. Inside the plate the frame (the halo) is a copy of the
neighbours' edges, exchanged before every step by `mesh.halo_exchange`. At the boundary of the plate, the frame keeps
its temperature. Each cell is computed from the same numbers in the same order as in one process, so the result
is equal to the last bit.
"""

import argparse
import math

import numpy as np

import meshdist as dist

Array = np.ndarray
DIFFUSION = 0.2  # up to 0.25 is stable


def plate(cells: int) -> Array:
    """Return the first temperatures of the whole plate: its boundary hot above and on the left, a spot inside cold."""
    u = np.zeros((cells + 2, cells + 2))
    u[0, :] = 1.0
    u[:, 0] = np.linspace(1.0, 0.0, cells + 2)
    u[cells // 2 : -cells // 6, cells // 2 : -cells // 6] = -1.0
    return u


def heat(u: Array, new: Array) -> None:
    """Compute the cells of `new` inside the frame from those of `u`."""
    middle = u[1:-1, 1:-1]
    above, below = u[:-2, 1:-1], u[2:, 1:-1]
    left, right = u[1:-1, :-2], u[1:-1, 2:]
    new[1:-1, 1:-1] = middle + DIFFUSION * (above + below + left + right - 4 * middle)


def picture(u: Array, lines: int = 12) -> str:
    """Return the plate as text."""
    pick = np.linspace(0, len(u) - 1, lines).round().astype(int)
    shades = np.array(list("oc,. -+#@"))  # from cold to hot
    levels = np.clip(np.rint((u[np.ix_(pick, pick)] + 1) * 4), 0, 8).astype(int)
    return "\n".join("  " + "".join(row) for row in shades[levels].repeat(2, axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Let heat flow through a plate that is shared out over a mesh.")
    parser.add_argument("--cells", type=int, default=48, help="of the plate, each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="(default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    size = dist.get_world_size()
    rows = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    shape = rows, size // rows
    if args.cells % shape[0] or args.cells % shape[1] or args.cells // shape[1] < 2:
        raise ValueError(
            f"--cells must be a multiple of both sides of the mesh {shape[0]} x {shape[1]}, got {args.cells}"
        )
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("y", "x"))
    height, width = args.cells // shape[0], args.cells // shape[1]
    top, left = height * mesh.get_local_rank("y"), width * mesh.get_local_rank("x")

    whole = plate(args.cells)
    u = whole[top : top + height + 2, left : left + width + 2].copy()
    new = u.copy()
    for _ in range(args.steps):
        mesh.halo_exchange(u)
        heat(u, new)
        u, new = new, u
    mine = u[1:-1, 1:-1]
    parts = [np.empty_like(mine) for _ in range(size)] if mesh.get_rank() == 0 else None
    mesh.gather(mine, parts, dst=0)
    warmth = mesh.all_reduce(np.array(mine.sum())).item() / args.cells**2

    same = True
    if parts is not None:
        whole[1:-1, 1:-1] = np.block([parts[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])])
        alone, other = plate(args.cells), plate(args.cells)
        for _ in range(args.steps):
            heat(alone, other)
            alone, other = other, alone
        same = bool(np.array_equal(whole, alone))
        print(picture(whole))
        print(f"after {args.steps} steps on a mesh of {shape[0]} x {shape[1]}: {warmth:.4f} on average")
        print(f"bit for bit what one process computes: {same}")
    dist.destroy_process_group()
    if not same:
        raise SystemExit("the temperatures are wrong")


if __name__ == "__main__":
    main()
