"""Operations on arrays that are cut by rows, in each library: this file is also what its ranks run.

    meshrun -n 2 benchmarks/sidebyside/array_cases.py meshdist 2048 5
    mpirun -n 2 python benchmarks/sidebyside/array_cases.py heat 2048 5

The last number is that of turns; "bytes" in its place counts what meshdist sends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Case = Callable[[], Any]
COLUMNS = 1024
CASES = (
    "exp(a) * 2 + b",
    "a.sum()",
    "a.mean(axis=0)",
    "a @ w",
    "a.T @ a",
    "rows to columns",
    "sort",
    "fft2, cut by rows as before",
    "fft2, then cut by columns",
)


def inputs(rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a matrix, one with as many rows as it has columns, and a vector to sort, the same on all ranks."""
    rng = np.random.default_rng(0)
    return rng.random((rows, COLUMNS)), rng.random((COLUMNS, COLUMNS // 4)), rng.random(rows * COLUMNS // 8)


def meshdist_cases(rows: int, mesh: Any = None) -> dict[str, Case]:
    import meshdist as dist
    from meshdist.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    matrix, weights, numbers = inputs(rows)
    a = distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None)
    w = distribute_tensor(weights, mesh, [Replicate()], src_data_rank=None)
    z = a + 1j
    v = distribute_tensor(numbers, mesh, [Shard(0)], src_data_rank=None)
    return {
        "exp(a) * 2 + b": lambda: np.exp(a) * 2 + a,
        "a.sum()": lambda: float(a.sum()),
        "a.mean(axis=0)": lambda: a.mean(axis=0).redistribute([Replicate()]),
        "a @ w": lambda: a @ w,
        "a.T @ a": lambda: (a.T @ a).redistribute([Shard(0)]),
        "rows to columns": lambda: a.redistribute([Shard(1)]),
        "sort": lambda: np.sort(v),
        "fft2, cut by rows as before": lambda: np.fft.fft2(z),
        "fft2, then cut by columns": lambda: np.fft.fft(np.fft.fft(z, axis=1).redistribute([Shard(1)]), axis=0),
    }


def heat_cases(rows: int) -> dict[str, Case]:
    import heat as ht
    import torch

    torch.set_num_threads(1)
    matrix, weights, numbers = inputs(rows)
    a, w, v = ht.array(matrix, split=0), ht.array(weights), ht.array(numbers, split=0)
    z = a + 1j
    return {
        "exp(a) * 2 + b": lambda: ht.exp(a) * 2 + a,
        "a.sum()": lambda: float(a.sum()),
        "a.mean(axis=0)": lambda: a.mean(axis=0),
        "a @ w": lambda: ht.matmul(a, w),
        "a.T @ a": lambda: ht.matmul(a.T, a),
        "rows to columns": lambda: ht.resplit(a, 1),
        "sort": lambda: ht.sort(v),
        "fft2, cut by rows as before": lambda: ht.fft.fft2(z),
    }


def mpi4py_fft_cases(rows: int) -> dict[str, Case]:
    from mpi4py import MPI
    from mpi4py_fft import PFFT, newDistArray

    transform = PFFT(MPI.COMM_WORLD, (rows, COLUMNS), axes=(0, 1), dtype=complex, grid=(-1, 1))
    z = newDistArray(transform, False)
    out = newDistArray(transform, True)
    z[...] = np.random.default_rng(0).random(z.shape) + 1j
    return {"fft2, then cut by columns": lambda: transform.forward(z, out, normalize=False)}


LIBRARIES = {"meshdist": meshdist_cases, "heat": heat_cases, "mpi4py-fft": mpi4py_fft_cases}


def timed(library: str, rows: int, turns: int) -> dict[str, float]:
    """Return the seconds that each case takes on the slowest rank: the median of some turns."""
    from sidebyside.turns import Turns, turns_of_meshdist

    if library == "meshdist":
        compared = turns_of_meshdist(3, 2000).compared
    else:
        from mpi4py import MPI

        compared = Turns(
            MPI.COMM_WORLD.Barrier, lambda number: MPI.COMM_WORLD.allreduce(number, MPI.MAX), 3, 2000
        ).compared
    cases = LIBRARIES[library](rows)
    return {name: compared({library: case}, turns)[library] / 1e6 for name, case in cases.items()}


def bytes_sent(rows: int) -> dict[str, int]:
    """Return the bytes that all ranks together send in a call of each case of meshdist, as its account has them."""
    import meshdist as dist

    sent = {}
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for name, case in meshdist_cases(rows, mesh).items():
        with mesh.account() as account:
            case()
        totals: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(totals, account.total().inside + account.total().between)
        sent[name] = sum(totals)
    return sent


def main() -> None:
    library, rows, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if library == "meshdist":
        import meshdist as dist

        dist.init_process_group()
        rank = dist.get_rank()
    else:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    if what == "bytes":
        found: Any = bytes_sent(rows)
    else:
        found = timed(library, rows, int(what))
    if rank == 0:
        print(json.dumps(found), flush=True)
    if library == "meshdist":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
