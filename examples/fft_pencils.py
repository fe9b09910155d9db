"""A three-dimensional Fourier transform of an array that is sharded into pencils over a mesh of two axes.

    meshrun -n 4 examples/fft_pencils.py --cells 64

Two axes of the mesh shard two dimensions, so that the third is unsharded: each holds a bundle of pencils. After
the transform of that dimension, an all_to_all over one axis makes the next dimension whole, and one over the other axis
the last (Dalcin, Mortensen and Keyes 2019, "Fast parallel multidimensional FFT using advanced MPI", J. Parallel and
Distributed Computing 128). The result stays where the last transform leaves it; `np.fft.rfftn` of the array does the
same, and moves the result back. Both are compared with the transform in one process, by scipy if it is installed.
"""

import argparse
import math

import numpy as np

import meshdist as dist
from meshdist.tensor import DTensor, Shard, random

try:
    from scipy.fft import rfftn
except ImportError:
    rfftn = np.fft.rfftn

PENCILS = [
    {"rows": Shard(0), "columns": Shard(1)},  # dimension 2 is whole
    {"rows": Shard(0), "columns": Shard(2)},  # dimension 1
    {"rows": Shard(1), "columns": Shard(2)},  # dimension 0
]


def transformed(x: DTensor) -> DTensor:
    """Return the transform of a real array that lies as the first pencils, as the last pencils."""
    y = np.fft.rfft(x, axis=2)
    y = np.fft.fft(y.redistribute(PENCILS[1]), axis=1)
    return np.fft.fft(y.redistribute(PENCILS[2]), axis=0)


def restored(y: DTensor, cells: int) -> DTensor:
    """Return the array of which `y` is the transform, by the same way back."""
    y = np.fft.ifft(y, axis=0).redistribute(PENCILS[1])
    y = np.fft.ifft(y, axis=1).redistribute(PENCILS[0])
    return np.fft.irfft(y, cells, axis=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Transform a three-dimensional array that is sharded into pencils.")
    parser.add_argument("--cells", type=int, default=48, help="of the grid, each way (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    size = dist.get_world_size()
    rows = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    mesh = dist.init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("rows", "columns"))
    x = random(0).standard_normal((args.cells,) * 3, mesh=mesh, placements=PENCILS[0])

    with mesh.account() as account:
        y = transformed(x)
    whole = np.fft.rfftn(x)
    known = rfftn(x.full())
    scale = np.abs(known).max()
    differences = [
        float(np.abs(y - known).max() / scale),
        float(np.abs(whole - known).max() / scale),
        float(np.abs(restored(y, args.cells) - x).max()),
    ]
    if mesh.get_rank() == 0:
        print(f"mesh of {rows} x {size // rows}; the transform lies as {y.placements}, by rfftn as {whole.placements}")
        print(account)
        print(f"largest difference from one process, of both ways and of the inverse: {max(differences):.1e}")
    dist.destroy_process_group()
    if max(differences) > 1e-12:
        raise SystemExit("the transform is wrong")


if __name__ == "__main__":
    main()
