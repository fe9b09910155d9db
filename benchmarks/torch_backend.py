"""Backend meshdist of torch.distributed beside Gloo: all_reduce by size, training steps, and DTensor.redistribute.

    torchrun --nproc-per-node 2 benchmarks/torch_backend.py

Both backends have a group in the same processes, and take turns: a load of the machine slows down both. The time of a
call is that of the slowest rank; the table has the median of the turns, in microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from sidebyside.turns import Turns
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import meshdist.torch  # noqa: F401 - registers the backend

SIZES = {"8 B": 8, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}


def slowest(number: float) -> float:
    greatest = torch.tensor([number])
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return greatest.item()


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def ddp(network: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(network, process_group=group)


def fsdp2(network: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    for layer in network.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh_of(group))
    return fully_shard(network, mesh=mesh_of(group))


def step_of(
    wrapped: Callable[[nn.Module, dist.ProcessGroup], nn.Module], group: dist.ProcessGroup, width: int
) -> Callable[[], None]:
    """Return a step of training of a network over the group."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = wrapped(nn.Sequential(*layers), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, width), torch.randint(0, 10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def redistribute(group: dist.ProcessGroup, rows: int, source: Placement, target: Placement) -> Callable[[], DTensor]:
    x = distribute_tensor(torch.ones(rows, 1024), mesh_of(group), [source])
    return lambda: x.redistribute(x.device_mesh, [target])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15, help="how often the backends take turns")
    parser.add_argument("--most-bytes", type=int, default=max(SIZES.values()))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compared = Turns(dist.barrier, slowest, warm_up=20, most_times=500).compared
    groups = {"gloo": dist.group.WORLD, "meshdist": dist.new_group(backend="meshdist")}

    def show(label: str, times: dict[str, float]) -> None:
        if dist.get_rank() == 0:
            ratio = times["gloo"] / times["meshdist"]
            print(f"{label:<36} {times['gloo']:>12.1f} {times['meshdist']:>12.1f} {ratio:>8.2f}", flush=True)

    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, one thread each; microseconds")
        print(f"{'':<36} {'gloo':>12} {'meshdist':>12} {'ratio':>8}")
    for size, nbytes in SIZES.items():
        if nbytes > options.most_bytes:
            continue
        x = torch.zeros(nbytes // 4)
        calls = {name: lambda group=group, x=x: dist.all_reduce(x, group=group) for name, group in groups.items()}
        show(f"all_reduce, {size}", compared(calls, options.turns))
    for name, wrapped in {"DDP": ddp, "FSDP2": fsdp2}.items():
        for label, width in {"40 KB": 64, "10 MB": 1120}.items():
            steps = {backend: step_of(wrapped, group, width) for backend, group in groups.items()}
            show(f"{name} step, network of {label}", compared(steps, options.turns))
    for rows in (16, 1024):
        for source, target in ((Shard(0), Replicate()), (Shard(0), Shard(1))):
            moves = {name: redistribute(group, rows, source, target) for name, group in groups.items()}
            show(f"{source} to {target}, {4 * rows} KiB", compared(moves, options.turns))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
