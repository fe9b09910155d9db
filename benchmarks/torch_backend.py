"""Backend meshdist of torch.distributed beside Gloo: all_reduce by size, and a step of DistributedDataParallel.

    torchrun --nproc-per-node 2 benchmarks/torch_backend.py

Both backends have a group in the same processes, and take turns: a load of the machine slows down both. The time of a
call is that of the slowest rank; the table has the median of the turns, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshdist.torch  # noqa: F401 - registers the backend

SIZES = [8 << (3 * exponent) for exponent in range(7)] + [64 << 20]
_TURN_S = 0.05


def turn(call: Callable[[], Any], times: int) -> float:
    """Return the time of one call on the slowest rank, in microseconds."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    mine = torch.tensor([(time.perf_counter() - began) / times * 1e6])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def compared(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Return the median time of each call; they take turns."""
    first = max(turn(call, 2) for call in calls.values())
    times = max(2, min(500, round(_TURN_S * 1e6 / first)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(turns):
        names = list(calls) if number % 2 else list(reversed(calls))
        for name in names:
            taken[name].append(turn(calls[name], times))
    return {name: statistics.median(each) for name, each in taken.items()}


def ddp_step(group: dist.ProcessGroup, width: int) -> Callable[[], None]:
    """Return a step of training of a small network over the group."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, width), torch.randint(0, 10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15, help="how often the backends take turns")
    parser.add_argument("--most-bytes", type=int, default=SIZES[-1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "meshdist": dist.new_group(backend="meshdist")}

    def show(label: str, times: dict[str, float]) -> None:
        if dist.get_rank() == 0:
            ratio = times["gloo"] / times["meshdist"]
            print(f"{label:<28} {times['gloo']:>12.1f} {times['meshdist']:>12.1f} {ratio:>8.2f}", flush=True)

    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, one thread each; microseconds")
        print(f"{'':<28} {'gloo':>12} {'meshdist':>12} {'ratio':>8}")
    for nbytes in (size for size in SIZES if size <= options.most_bytes):
        x = torch.zeros(nbytes // 4)
        calls = {name: lambda group=group, x=x: dist.all_reduce(x, group=group) for name, group in groups.items()}
        show(f"all_reduce, {nbytes} bytes", compared(calls, options.turns))
    for width in (64, 1024):
        calls = {name: ddp_step(group, width) for name, group in groups.items()}
        show(f"DDP step, width {width}", compared(calls, options.turns))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
