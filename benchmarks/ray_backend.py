"""Backend MESHDIST of ray.util.collective beside Ray's GLOO, which needs torch: allreduce of NumPy arrays by size.

    python benchmarks/ray_backend.py --ranks 2

Both backends have a group of the same actors, and take turns: a load of the machine slows down both. The time of a call
is that of the slowest rank; the table has the median of the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import ray
from ray.util import collective

import meshdist.ray  # noqa: F401 - registers the backend

SIZES = {"8 B": 8, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
BACKENDS = ("GLOO", "MESHDIST")
_WARM_UP = 10
_TURN_S = 0.05


@ray.remote(num_cpus=0)
class Rank:
    """An actor in one group of each backend."""

    def join(self, rank: int, size: int) -> list[str]:
        """Return the backends that can be used here, after this rank has joined their groups."""
        usable = [backend for backend in BACKENDS if collective.is_backend_available(backend)]
        for backend in usable:
            collective.init_collective_group(size, rank, backend, backend)
        return usable

    def turn(self, backend: str, num_bytes: int, times: int) -> float:
        """Return the time of one call, in microseconds."""
        x = np.ones(num_bytes // 8)
        collective.barrier(backend)
        began = time.perf_counter()
        for _ in range(times):
            collective.allreduce(x, backend, collective.types.ReduceOp.MAX)
        return (time.perf_counter() - began) / times * 1e6


def slowest(ranks: list[Any], *args: Any) -> float:
    return max(ray.get([rank.turn.remote(*args) for rank in ranks]))


def medians(ranks: list[Any], backends: list[str], num_bytes: int, turns: int) -> dict[str, float]:
    """Return the median time of a call of each backend, in microseconds."""
    first = max(slowest(ranks, backend, num_bytes, _WARM_UP) for backend in backends)
    times = max(2, min(500, round(_TURN_S * 1e6 / first)))
    taken: dict[str, list[float]] = {backend: [] for backend in backends}
    for number in range(turns):
        for backend in backends if number % 2 else reversed(backends):
            taken[backend].append(slowest(ranks, backend, num_bytes, times))
    return {backend: statistics.median(each) for backend, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of actors")
    parser.add_argument("--turns", type=int, default=9, help="turns of each backend")
    given = parser.parse_args()
    ray.init(include_dashboard=False, runtime_env={"worker_process_setup_hook": "meshdist.ray.register"})
    try:
        ranks = [Rank.remote() for _ in range(given.ranks)]
        backends = ray.get([rank.join.remote(place, given.ranks) for place, rank in enumerate(ranks)])[0]
        print(f"| {given.ranks} actors | {' | '.join(f'{backend}, us' for backend in backends)} |")
        print(f"| --- |{' ---: |' * len(backends)}")
        for name, num_bytes in SIZES.items():
            found = medians(ranks, backends, num_bytes, given.turns)
            print(f"| allreduce, {name} | {' | '.join(f'{found[backend]:.1f}' for backend in backends)} |")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
