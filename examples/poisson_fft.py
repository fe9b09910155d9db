"""Solve Poisson's equation on a periodic square by Fourier transforms of arrays over a mesh.

    meshrun -n 4 examples/poisson_fft.py --cells 256

The solution u of -(u_xx + u_yy) = f is, for each pair of wave numbers, the Fourier coefficient of f divided by the
sum of their squares. `np.fft.fft2` of an array that is sharded along a transformed dimension shards another
dimension for a while; everything else is local. The right side here is that of u = exp(cos x + sin y), so the error is
known.
"""

import argparse
import math

import numpy as np

import meshdist as dist
from meshdist.tensor import DTensor, Shard, distribute_tensor


def solved(f: DTensor, along_y: DTensor, along_x: DTensor) -> DTensor:
    """Return the solution of mean 0 for the right side `f`, given the wave numbers along both axes."""
    squares = along_y**2 + along_x**2
    return np.fft.ifft2(np.where(squares == 0, 0, np.fft.fft2(f) / np.maximum(squares, 1))).real


def main() -> None:
    parser = argparse.ArgumentParser(description="Solve Poisson's equation by distributed Fourier transforms.")
    parser.add_argument("--cells", type=int, default=128, help="of the grid, each way (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    size = dist.get_world_size()
    rows = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    mesh = dist.init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("rows", "columns"))

    def along_both(values: np.ndarray) -> tuple[DTensor, DTensor]:
        """Return the same values as a column, sharded as the rows of the grid, and as a row, sharded as its columns."""
        down = distribute_tensor(values[:, None], mesh, {"rows": Shard(0)}, src_data_rank=None)
        across = distribute_tensor(values[None, :], mesh, {"columns": Shard(1)}, src_data_rank=None)
        return down, across

    y, x = along_both(np.arange(args.cells) * 2 * np.pi / args.cells)
    waves = along_both(np.fft.fftfreq(args.cells, 1 / args.cells))
    known = np.exp(np.cos(x) + np.sin(y))
    f = -known * (np.sin(x) ** 2 + np.cos(y) ** 2 - np.cos(x) - np.sin(y))
    with mesh.account() as account:
        u = solved(f, *waves)
    error = float(np.abs(u - (known - known.mean())).max())
    if mesh.get_rank() == 0:
        u.show("text")
        print(account)
        print(f"largest difference from the known solution: {error:.1e}")
    dist.destroy_process_group()
    if error > 1e-9:
        raise SystemExit("the solution is wrong")


if __name__ == "__main__":
    main()
