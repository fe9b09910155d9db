"""What a project that is type checked writes with meshdist; lines that must be refused carry the reason."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

import meshdist as dist
from meshdist import functional
from meshdist.device_mesh import DeviceMesh, init_device_mesh


def train(x: NDArray[np.float64]) -> float:
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    axis: DeviceMesh = mesh["tp"]
    both: DeviceMesh = mesh["dp", "tp"]
    axis.all_reduce(x, op="avg")
    both.broadcast(x, src=0)
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        first: int = coordinate[0]
        print(first)
    group: dist.ProcessGroup = mesh.get_group("tp")
    ranks: list[int] = dist.get_process_group_ranks(group)
    work = dist.all_reduce(x, dist.ReduceOp.SUM, group, async_op=True)
    work.wait()
    sending: dist.Work = dist.isend(x, dst=ranks[-1])
    done: bool = sending.wait(timedelta(seconds=3))
    source: int = dist.recv(x)
    print(done, source)
    with mesh.account() as account, dist.profile() as p:
        group.barrier()
    print(account, [event.nbytes for event in p.events])
    timeline = p.merged()
    if timeline is not None:
        timeline.export_chrome_trace("trace.json")
    return float(x.sum())


def exchange(x: NDArray[np.float64], axis: int | None) -> float:
    length: int = len(functional.all_to_all([x, x]))
    means = [block.mean() for block in functional.all_gather(x)]
    moved = functional.all_to_all(x, axis=0).reshape(-1) + functional.all_to_all(x, dim=-1).reshape(-1)
    either = functional.all_to_all(x, axis=axis)
    first: NDArray[np.float64] = either[0]
    return float(sum(means) + moved.sum() + first.sum()) / length


def main() -> None:
    dist.init_process_group("gloo", timeout=60.0)
    results: list[float] = dist.run(train, 4, args=(np.zeros(3),))
    store: dist.Store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    value: bytes = store.get("key")
    with dist.dry_run(world_size=8, rank=0) as dry:
        print(dry.account.total().calls, results, value)
    dist.destroy_process_group()


def wrong(x: NDArray[np.float64]) -> None:
    dist.all_reduce(x, operation="sum")  # type: ignore[call-arg]
    dist.init_process_group(worldsize=2)  # type: ignore[call-arg]
    dist.no_such_function()  # type: ignore[attr-defined]
    dist.get_rank().upper()  # type: ignore[attr-defined]
    init_device_mesh("cpu", "2x2")  # type: ignore[arg-type]
    dist.run("train", 2)  # type: ignore[arg-type]
    functional.all_to_all([x, x]).sum()  # type: ignore[attr-defined]
    functional.all_to_all(x, axis=0).append(x)  # type: ignore[attr-defined]
    functional.all_to_all(x, dim=0).append(x)  # type: ignore[attr-defined]
    functional.all_gather(x).sum()  # type: ignore[attr-defined]
