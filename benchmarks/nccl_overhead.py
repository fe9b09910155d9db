"""What a call of the nccl backend costs the host, over CuPy's own call of NCCL; and the bandwidth of all_reduce.

python benchmarks/nccl_overhead.py                                        # one rank, one GPU
python benchmarks/nccl_overhead.py --torch                                # and torch.distributed's, of the same size
meshrun --nproc-per-node gpu benchmarks/nccl_overhead.py                  # a rank for each GPU
meshrun --nproc-per-node gpu benchmarks/nccl_overhead.py --bandwidth      # of 8 B to 1 GiB

With more ranks than GPUs, set NCCL_MULTI_RANK_GPU_ENABLE=1, NCCL_NVLS_ENABLE=0 and NCCL_MAX_CTAS=2 (from NCCL 2.30 on).

The host enqueues and does not wait, so what is measured is the enqueueing: the raw `NcclCommunicator.allReduce`, the
sync `dist.all_reduce`, and an async call with its `wait()`. They take turns, and the device is idle before each turn; a
turn is short enough that the queue of the device never fills. The overhead is the difference within a round, and the
table gives the median round. The goal is 10 us.

The bandwidth is that of NCCL's own tests: with n ranks, 2 (n - 1) / n times the bytes of the array, over the time on
the device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import meshdist as dist

GOAL_US = 10.0


def raw_call(cupy: Any, x: Any) -> Callable[[], object]:
    """Return CuPy's own all_reduce of `x`, on a communicator and a stream of its own."""
    from cupy.cuda import nccl

    unique_id = [nccl.get_unique_id() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(unique_id, 0)
    comm = nccl.NcclCommunicator(dist.get_world_size(), unique_id[0], dist.get_rank())
    stream = cupy.cuda.Stream(non_blocking=True)
    return lambda: comm.allReduce(x.data.ptr, x.data.ptr, x.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)


def torch_calls(nbytes: int) -> list[Callable[[], object]]:
    """Return the sync and the async all_reduce of torch.distributed, on a tensor of so many bytes."""
    import torch
    import torch.distributed as torch_dist

    if not torch_dist.is_initialized():
        torch_dist.init_process_group("nccl", store=torch_dist.HashStore(), rank=0, world_size=1)
    y = torch.zeros(nbytes // 4, device="cuda")
    return [lambda: torch_dist.all_reduce(y), lambda: torch_dist.all_reduce(y, async_op=True).wait()]


def turn(cupy: Any, call: Callable[[], object], calls: int) -> float:
    """Return the microseconds that a call takes to enqueue."""
    cupy.cuda.Device().synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - begin
    cupy.cuda.Device().synchronize()
    return took / calls * 1e6


def bandwidth(cupy: Any, rounds: int) -> list[str]:
    """Return a table of the time and the bus bandwidth of all_reduce, on the device."""
    size = dist.get_world_size()
    lines = [f"{'bytes':>12}  {'us':>10}  {'GB/s':>8}  {'bus GB/s':>8}"]
    for exponent in range(3, 31, 3):
        nbytes = 1 << exponent
        x = cupy.zeros(nbytes // 4, np.float32)
        calls = max(2, min(50, (1 << 27) // nbytes))
        times = []
        for _ in range(rounds + 1):
            dist.barrier()
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            for _ in range(calls):
                dist.all_reduce(x)
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / calls * 1e3)
        took = statistics.median(times[1:])
        rate = nbytes / took / 1e3
        lines.append(f"{nbytes:>12}  {took:>10.1f}  {rate:>8.2f}  {rate * 2 * (size - 1) / size:>8.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What a call of the nccl backend costs over CuPy's own.")
    parser.add_argument("--rounds", type=int, default=50, help="rounds of turns (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=100, help="calls in a turn (default: %(default)s)")
    parser.add_argument("--bandwidth", action="store_true", help="measure the bandwidth of all_reduce instead")
    parser.add_argument("--torch", action="store_true", help="measure torch.distributed, too; on one rank")
    args = parser.parse_args()

    import cupy

    device = int(os.environ.get("LOCAL_RANK", "0")) % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(device).use()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **alone)
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    title = f"{dist.get_world_size()} ranks, {name}, CuPy {cupy.__version__}"
    if args.bandwidth:
        lines = bandwidth(cupy, min(args.rounds, 5))
        if dist.get_rank() == 0:
            print(f"{title}; all_reduce of float32", *lines, sep="\n")
        dist.destroy_process_group()
        return
    if args.torch and dist.get_world_size() > 1:
        parser.error("--torch measures one rank")
    names = ["raw", "sync", "async", *(["torch", "torch async"] if args.torch else []), "sync - raw"]
    lines = [f"{'bytes':>10}" + "".join(f"  {name:>11}" for name in names)]
    worst = 0.0
    for nbytes in (8, 1 << 10, 1 << 20):
        x = cupy.zeros(nbytes // 4, np.float32)
        ways = [raw_call(cupy, x), lambda x=x: dist.all_reduce(x), lambda x=x: dist.all_reduce(x, async_op=True).wait()]
        if args.torch:
            ways += torch_calls(nbytes)
        for way in ways:
            turn(cupy, way, args.calls)
        rounds = [[turn(cupy, way, args.calls) for way in ways] for _ in range(args.rounds)]
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        over = statistics.median(times[1] - times[0] for times in rounds)
        worst = max(worst, over)
        lines.append(f"{nbytes:>10}" + "".join(f"  {us:>11.2f}" for us in (*medians, over)))
    if dist.get_rank() == 0:
        print(f"{title}; microseconds a call")
        print("\n".join(lines))
        print(f"the overhead is at most {worst:.2f} us; the goal is {GOAL_US:g} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
