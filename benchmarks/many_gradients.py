"""Many gradients: one all_reduce for each, one all_reduce_coalesced, and one all_reduce of a flat array, in turns.

meshrun -n 2 benchmarks/many_gradients.py --arrays 200 --elements 1000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from sidebyside.options import positive

import meshdist as dist


def ways(num_arrays: int, num_elements: int) -> dict[str, Callable[[], object]]:
    """Return what reduces the same number of float32 elements in each way."""
    gradients = [np.ones(num_elements, np.float32) for _ in range(num_arrays)]
    flat = np.ones(num_arrays * num_elements, np.float32)

    def one_each() -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, op="avg")

    return {
        "one all_reduce each": one_each,
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(gradients, op="avg"),
        "all_reduce of a flat array": lambda: dist.all_reduce(flat, op="avg"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays", type=positive, default=200)
    parser.add_argument("--elements", type=positive, default=1000, help="of each array, float32")
    parser.add_argument("--rounds", type=positive, default=50)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    timed = ways(options.arrays, options.elements)
    rounds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(options.rounds + 1):  # the first round makes the plans
        for name, call in timed.items():
            dist.barrier()
            begin_s = time.perf_counter()
            call()
            rounds[name].append(time.perf_counter() - begin_s)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.arrays} arrays of {options.elements} float32")
        each_s = rounds["one all_reduce each"][1:]
        for name, times_s in rounds.items():
            ratio = median(each / taken for each, taken in zip(each_s, times_s[1:], strict=True))
            print(f"{name}: {1e6 * median(times_s[1:]):.0f} us, {ratio:.1f} times as fast as one call each")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
