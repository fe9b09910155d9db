"""Arrays over a mesh beside torch's DTensor over Gloo, and beside NumPy or the bare collective.

    meshrun -n 2 benchmarks/arrays.py

Where torch is not installed, its column is empty. The libraries take turns in the same processes: a load of the machine
slows down all. The time of a call is that of the slowest rank; the table has the median of the turns, in microseconds.
"memcpy" is what all ranks together need, at the same time, to copy as many bytes as the redistribution writes at least
through shared memory: the messages, and the result. Where a call takes little more, the memory is its limit.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from sidebyside.turns import Calls, join_torch, leave_torch, turns_of_meshdist

import meshdist as dist
from meshdist.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

SIZES = {"8 KiB": 8 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
COLUMNS = ("meshdist", "torch", "bare", "memcpy")
_WARM_UP = 45  # more than the calls in which plans try algorithms


def overhead_calls(mesh: dist.DeviceMesh, torch_mesh: Any) -> dict[str, Calls]:
    """Return calls on small arrays, which send nothing: their time is the overhead."""
    block = np.ones((16, 8))
    x = DTensor.from_local(block, mesh, [Shard(0)], shape=(16 * mesh.size(), 8))
    rows: dict[str, Calls] = {
        "a + b, sharded the same way": {"meshdist": lambda: x + x, "bare": lambda: block + block},
        "np.exp(a)": {"meshdist": lambda: np.exp(x), "bare": lambda: np.exp(block)},
        "a[:, 2:4], an unsharded dimension": {"meshdist": lambda: x[:, 2:4], "bare": lambda: block[:, 2:4]},
        "to_local": {"meshdist": x.to_local},
        "a.sum(axis=1)": {"meshdist": lambda: x.sum(axis=1), "bare": lambda: block.sum(axis=1)},
        "np.where(a > 0, a, 0)": {
            "meshdist": lambda: np.where(mask, x, 0),
            "bare": lambda: np.where(positive, block, 0),
        },
        "np.clip(a, 0, 1)": {"meshdist": lambda: np.clip(x, 0, 1), "bare": lambda: np.clip(block, 0, 1)},
        "np.concatenate([a, a], axis=1)": {
            "meshdist": lambda: np.concatenate([x, x], axis=1),
            "bare": lambda: np.concatenate([block, block], axis=1),
        },
        "a @ w, w replicates": {},
    }
    positive, mask = block > 0, x > 0
    w = distribute_tensor(np.ones((8, 8)), mesh, src_data_rank=None)
    rows["a @ w, w replicates"] = {"meshdist": lambda: x @ w, "bare": lambda: block @ block[:8]}
    if torch_mesh is not None:
        import torch
        from torch.distributed import tensor as torch_tensor

        local = torch.ones(16, 8)
        y = torch_tensor.DTensor.from_local(local, torch_mesh, [torch_tensor.Shard(0)])
        above = y > 0
        v = torch_tensor.DTensor.from_local(torch.ones(8, 8), torch_mesh, [torch_tensor.Replicate()])
        for name, call in (
            ("a + b, sharded the same way", lambda: y + y),
            ("np.exp(a)", lambda: torch.exp(y)),
            ("a[:, 2:4], an unsharded dimension", lambda: y[:, 2:4]),
            ("to_local", y.to_local),
            ("a.sum(axis=1)", lambda: y.sum(dim=1)),
            ("np.where(a > 0, a, 0)", lambda: torch.where(above, y, 0.0)),
            ("np.clip(a, 0, 1)", lambda: torch.clamp(y, 0, 1)),
            ("np.concatenate([a, a], axis=1)", lambda: torch.cat([y, y], dim=1)),
            ("a @ w, w replicates", lambda: y @ v),
        ):
            rows[name]["torch"] = call
    return rows


def moving_calls(mesh: dist.DeviceMesh, torch_mesh: Any, nbytes: int) -> dict[str, Calls]:
    """Return calls of redistribute on a whole array of about `nbytes`, with the collective that each is."""
    ranks = mesh.size()
    side = max(1, round((nbytes / 8) ** 0.5 / ranks**2)) * ranks**2
    whole = np.ones((side, side))
    cut = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    pending = DTensor.from_local(whole, mesh, [Partial()], shape=whole.shape)
    block = cut.to_local()
    rows_each = side // ranks

    def rows_to_columns() -> np.ndarray[Any, Any]:
        made = np.empty((side, rows_each))
        parts = [slice(rank * rows_each, (rank + 1) * rows_each) for rank in range(ranks)]
        mesh.all_to_all([made[part] for part in parts], [block[:, part] for part in parts])
        return made

    rows: dict[str, Calls] = {
        "Shard(0) to Shard(1)": {
            "meshdist": lambda: cut.redistribute([Shard(1)]),
            "bare": rows_to_columns,
        },
        "Shard(0) to Replicate": {
            "meshdist": lambda: cut.redistribute([Replicate()]),
            "bare": lambda: mesh.all_gather_into_tensor(np.empty_like(whole), block),
        },
        "Partial to Replicate": {
            "meshdist": lambda: pending.redistribute([Replicate()]),
            "bare": lambda: mesh.all_reduce(whole.copy()),
        },
        "Partial to Shard(0)": {
            "meshdist": lambda: pending.redistribute([Shard(0)]),
            "bare": lambda: mesh.reduce_scatter_tensor(np.empty_like(block), whole),
        },
    }
    message, of_all = whole.nbytes // ranks, whole.nbytes
    written = {
        "Shard(0) to Shard(1)": block.nbytes + block.nbytes * (ranks - 1) // ranks,
        "Shard(0) to Replicate": of_all + message,
        "Partial to Replicate": of_all + of_all * (ranks - 1) // ranks + message,
        "Partial to Shard(0)": block.nbytes + of_all * (ranks - 1) // ranks,
    }
    origin, copy = np.ones(2 * of_all, np.uint8), np.ones(2 * of_all, np.uint8)
    for name, nbytes in written.items():
        rows[name]["memcpy"] = lambda nbytes=nbytes: np.copyto(copy[:nbytes], origin[:nbytes])
    if torch_mesh is not None:
        import torch
        from torch.distributed import tensor as torch_tensor

        theirs = {"Shard(0)": torch_tensor.Shard(0), "Shard(1)": torch_tensor.Shard(1)}
        theirs |= {"Replicate": torch_tensor.Replicate(), "Partial": torch_tensor.Partial()}
        for name, calls in rows.items():
            source, target = name.split(" to ")
            local = torch.from_numpy(whole if source == "Partial" else block)
            y = torch_tensor.DTensor.from_local(local, torch_mesh, [theirs[source]], run_check=False)
            calls["torch"] = lambda y=y, target=target: waited(y.redistribute(torch_mesh, [theirs[target]]).to_local())
    return rows


def waited(local: Any) -> Any:
    """Return a tensor that may still be under way when it is there."""
    return local.wait() if hasattr(local, "wait") else local


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=11, help="how often the libraries take turns")
    parser.add_argument("--most-bytes", type=int, default=max(SIZES.values()))
    options = parser.parse_args()
    dist.init_process_group()
    ranks = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (ranks,))
    torch_mesh = None
    if join_torch():
        from torch.distributed.device_mesh import init_device_mesh

        torch_mesh = init_device_mesh("cpu", (ranks,))
    compared = turns_of_meshdist(_WARM_UP, 2000).compared

    def show(label: str, calls: Calls) -> None:
        times = compared(calls, options.turns)
        if dist.get_rank() == 0:
            columns = "".join(f"{times[name]:>12.1f}" if name in times else f"{'':>12}" for name in COLUMNS)
            ratio = f"{times['torch'] / times['meshdist']:>12.1f}" if "torch" in times else ""
            print(f"{label:<36}{columns}{ratio}", flush=True)

    if dist.get_rank() == 0:
        print(f"{ranks} ranks; microseconds" + ("" if torch_mesh is None else "; torch's DTensor runs over Gloo"))
        print(f"{'':<36}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'torch/ours':>12}")
    for label, calls in overhead_calls(mesh, torch_mesh).items():
        show(label, calls)
    for size, nbytes in SIZES.items():
        if nbytes <= options.most_bytes:
            for label, calls in moving_calls(mesh, torch_mesh, nbytes).items():
                show(f"{label}, {size}", calls)
    if torch_mesh is not None:
        leave_torch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
