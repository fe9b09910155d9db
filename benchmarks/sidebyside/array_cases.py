"""Operations on arrays that are cut by rows, in each library: this file is also what its ranks run.

    meshrun -n 2 benchmarks/sidebyside/array_cases.py meshdist 2048 5
    torchrun --nproc-per-node 2 benchmarks/sidebyside/array_cases.py torch 2048 5
    mpirun -n 2 python benchmarks/sidebyside/array_cases.py heat 2048 5

The last number is that of turns; "bytes" in its place counts what meshdist sends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Case = Callable[[], Any]
COLUMNS = 1024
CASES = (
    "s + s, of 8 x 8 numbers",
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
    s = distribute_tensor(matrix[:8, :8].copy(), mesh, [Shard(0)], src_data_rank=None)
    return {
        "s + s, of 8 x 8 numbers": lambda: s + s,
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


def torch_cases(rows: int) -> dict[str, Case]:
    """Return the cases of torch's DTensor over Gloo; what it does not have fails, on all ranks alike."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    matrix, weights, numbers = map(torch.from_numpy, inputs(rows))
    a, w = distribute_tensor(matrix, mesh, [Shard(0)]), distribute_tensor(weights, mesh, [Replicate()])
    v, s = distribute_tensor(numbers, mesh, [Shard(0)]), distribute_tensor(matrix[:8, :8].clone(), mesh, [Shard(0)])
    z = distribute_tensor(matrix + 1j, mesh, [Shard(0)])
    cases: dict[str, Case] = {
        "s + s, of 8 x 8 numbers": lambda: s + s,
        "exp(a) * 2 + b": lambda: torch.exp(a) * 2 + a,
        "a.sum()": lambda: float(a.sum().full_tensor()),
        "a.mean(axis=0)": lambda: a.mean(dim=0).redistribute(mesh, [Replicate()]),
        "a @ w": lambda: a @ w,
        "a.T @ a": lambda: (a.T @ a).redistribute(mesh, [Shard(0)]),
        "rows to columns": lambda: a.redistribute(mesh, [Shard(1)]),
        "sort": lambda: torch.sort(v)[0],
        "fft2, cut by rows as before": lambda: torch.fft.fft2(z),
        "fft2, then cut by columns": lambda: torch.fft.fft(
            torch.fft.fft(z, dim=1).redistribute(mesh, [Shard(1)]), dim=0
        ),
    }
    return {name: case for name, case in cases.items() if _works(case)}


def _works(case: Case) -> bool:
    try:
        case()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def heat_cases(rows: int) -> dict[str, Case]:
    import heat as ht
    import torch

    torch.set_num_threads(1)
    matrix, weights, numbers = inputs(rows)
    a, w, v = ht.array(matrix, split=0), ht.array(weights), ht.array(numbers, split=0)
    z, s = a + 1j, ht.array(matrix[:8, :8].copy(), split=0)
    return {
        "s + s, of 8 x 8 numbers": lambda: s + s,
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


LIBRARIES = {"meshdist": meshdist_cases, "torch": torch_cases, "heat": heat_cases, "mpi4py-fft": mpi4py_fft_cases}


def timed(library: str, rows: int, turns: int) -> dict[str, float]:
    """Return the seconds that each case takes on the slowest rank: the median of some turns."""
    from sidebyside.turns import Turns, turns_of_meshdist

    if library == "meshdist":
        compared = turns_of_meshdist(3, 2000).compared
    elif library == "torch":
        compared = Turns(_torch_barrier, _most_of_torch, 3, 2000).compared
    else:
        from mpi4py import MPI

        compared = Turns(
            MPI.COMM_WORLD.Barrier, lambda number: MPI.COMM_WORLD.allreduce(number, MPI.MAX), 3, 2000
        ).compared
    cases = LIBRARIES[library](rows)
    return {name: compared({library: case}, turns)[library] / 1e6 for name, case in cases.items()}


def _torch_barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _most_of_torch(number: float) -> float:
    import torch
    import torch.distributed as dist

    most = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


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
    elif library == "torch":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
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
    elif library == "torch":
        torch.distributed.barrier()
        os._exit(0)  # after destroy_process_group, torch 2.13 aborts now and then


if __name__ == "__main__":
    main()
