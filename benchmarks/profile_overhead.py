"""What `meshdist.profile` adds to a call: with and without, in turns.

    python benchmarks/profile_overhead.py

The calls are those of a dry run, as one rank of a world that is not there: so nobody is waited for, and what is
measured is what the calls and the recording cost this rank. Printed is what the shortest round took with it and without
it, and the difference, which is that of a machine at rest; and the median of the differences of all rounds.
"""

import argparse
from collections.abc import Callable
from time import perf_counter

import numpy as np

import meshdist as dist


def seconds_per_call(call: Callable[[], object], calls: int) -> float:
    """Return the time of one call."""
    began = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what profiling costs.")
    parser.add_argument("--rounds", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="in each half of a round (default: %(default)s)")
    args = parser.parse_args()
    with dist.dry_run(world_size=4, rank=0):
        mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        x, parts = np.zeros(1), [np.zeros(1) for _ in range(4)]
        measured: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(x),
            "mesh.all_reduce": lambda: mesh.all_reduce(x),
            "all_gather": lambda: dist.all_gather(parts, x),
            "all_reduce, async": lambda: dist.all_reduce(x, async_op=True).wait(),
            "send": lambda: dist.send(x, 1),
            "isend": lambda: dist.isend(x, 1).wait(),
        }
        for name, call in measured.items():
            seconds_per_call(call, args.calls)
            plain, profiled = [], []
            for _ in range(args.rounds):
                plain.append(seconds_per_call(call, args.calls))
                with dist.profile():
                    profiled.append(seconds_per_call(call, args.calls))
            us = [1e6 * min(plain), 1e6 * min(profiled), 1e6 * float(np.median(np.subtract(profiled, plain)))]
            print(
                f"{name:18} {us[0]:6.2f} us, profiled {us[1]:6.2f} us: {us[1] - us[0]:.2f} us more;"
                f" median of the rounds {us[2]:.2f} us more"
            )


if __name__ == "__main__":
    main()
