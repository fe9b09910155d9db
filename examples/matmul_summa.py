"""Multiply matrices that are distributed in blocks: SUMMA on a 2-D mesh.

    meshrun -n 4 examples/matmul_summa.py --size 768

On a mesh of P x Q ranks, rank (i, j) holds block (i, j) of A, of B and of the product C. C is a sum over panels, of
some columns of A times the same rows of B. For each panel, the ranks with its columns of A broadcast them along their
row of the mesh, the ranks with its rows of B along their column, and every rank adds one product to its block of C.
Meanwhile, the next panels are broadcast. A rank holds at most its blocks and two panels of each matrix.

van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm", 1997.
"""

import argparse
import math
from time import perf_counter

import numpy as np

import meshdist as dist

Array = np.ndarray


def cut(matrix: Array, shape: tuple[int, int], place: tuple[int, int]) -> Array:
    """Return the block of `matrix` at this place of a mesh."""
    rows = np.split(matrix, shape[0])[place[0]]
    return np.ascontiguousarray(np.split(rows, shape[1], axis=1)[place[1]])


def multiply(mesh: dist.DeviceMesh, a: Array, b: Array, width: int) -> Array:
    """Return this rank's block of the product.

    Args:
        mesh: P x Q ranks with the axes "row" and "column".
        a: This rank's block (m/P, k/Q).
        b: This rank's block (k/P, n/Q).
        width: Columns of A, and rows of B, in a panel; no panel may reach over the edge of a block.
    """
    # The ranks of a row of the mesh differ in their column.
    along_row, along_column = mesh["column"], mesh["row"]

    def fetch(begin: int) -> tuple[Array, Array, list[dist.Work]]:
        owner_of_a, from_column = divmod(begin, a.shape[1])
        owner_of_b, from_row = divmod(begin, b.shape[0])
        panel_a, panel_b = np.empty((len(a), width), a.dtype), np.empty((width, b.shape[1]), b.dtype)
        if along_row.get_local_rank() == owner_of_a:
            panel_a[:] = a[:, from_column : from_column + width]
        if along_column.get_local_rank() == owner_of_b:
            panel_b[:] = b[from_row : from_row + width]
        works = [
            along_row.broadcast(panel_a, src=owner_of_a, async_op=True),
            along_column.broadcast(panel_b, src=owner_of_b, async_op=True),
        ]
        return panel_a, panel_b, works

    c = np.zeros((len(a), b.shape[1]), a.dtype)
    begins = range(0, a.shape[1] * along_row.size(), width)
    ahead = fetch(0)
    for begin in begins:
        panel_a, panel_b, works = ahead
        for work in works:
            work.wait()
        if begin + width < begins.stop:
            ahead = fetch(begin + width)
        c += panel_a @ panel_b
    return c


def main() -> None:
    parser = argparse.ArgumentParser(description="Multiply two square matrices on a 2-D mesh of ranks.")
    parser.add_argument("--size", type=int, default=480, help="rows and columns (default: %(default)s)")
    parser.add_argument("--panels", type=int, default=4, help="panels of a block, at least (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    size = dist.get_world_size()
    p = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    shape = p, size // p
    step = math.lcm(*shape)
    if args.size % step:
        raise ValueError(f"--size must be a multiple of {step} on a mesh of {shape[0]} x {shape[1]}, got {args.size}")
    per_step = args.size // step  # what any number of panels of a block must divide
    width = per_step // max(n for n in range(1, args.panels + 1) if per_step % n == 0)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("row", "column"))
    place = mesh.get_coordinate()

    rng = np.random.default_rng(seed=0)  # the same on every rank, which makes the whole matrices to check the result
    a, b = rng.standard_normal((2, args.size, args.size))
    mine_of_a, mine_of_b = cut(a, shape, place), cut(b, shape, place)
    mesh.barrier()
    began = perf_counter()
    with mesh.account() as account:
        c = multiply(mesh, mine_of_a, mine_of_b, width)
    mesh.barrier()
    seconds = perf_counter() - began

    whole = a @ b
    worst = mesh.all_reduce(np.array(np.abs(c - cut(whole, shape, place)).max()), op="max").item()
    if mesh.get_rank() == 0:
        held = (mine_of_a.nbytes + mine_of_b.nbytes + c.nbytes) / (a.nbytes + b.nbytes + whole.nbytes)
        print(
            f"{args.size} x {args.size} on a mesh of {shape[0]} x {shape[1]}, {args.size // width} panels of {width}:"
        )
        print(f"{2 * args.size**3 / seconds / 1e9:.2f} GFLOP/s together; rank 0 holds {held:.0%} of the matrices")
        print(f"largest difference from a @ b in one process: {worst:.1e}")
        print(account)
    dist.destroy_process_group()
    if worst > 1e-10 * args.size:
        raise SystemExit("the product is wrong")


if __name__ == "__main__":
    main()
