"""Calls of all ranks that take turns, so that a load of the machine slows down all; and torch in the same processes."""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import meshdist as dist

Calls = dict[str, Callable[[], Any]]
_TURN_S = 0.05


class Turns:
    """Times calls in turns.

    Args:
        barrier: Waits for all ranks.
        slowest: Returns the greatest of the numbers that the ranks pass.
        warm_up: How often each call is made first.
        most_times: At most so many calls are a turn.
    """

    def __init__(
        self, barrier: Callable[[], object], slowest: Callable[[float], float], warm_up: int, most_times: int
    ) -> None:
        self._barrier = barrier
        self._slowest = slowest
        self._warm_up = warm_up
        self._most_times = most_times

    def compared(self, calls: Calls, turns: int) -> dict[str, float]:
        """Return the median time of each call on the slowest rank, in microseconds."""
        return {name: statistics.median(taken) for name, taken in self.rounds(calls, turns).items()}

    def rounds(self, calls: Calls, turns: int) -> dict[str, list[float]]:
        """Return the times of each call, one for each turn, in microseconds."""
        for call in calls.values():
            self._turn(call, self._warm_up)
        first = max(self._turn(call, 2) for call in calls.values())
        times = max(2, min(self._most_times, round(_TURN_S * 1e6 / first)))
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(turns):
            for name in list(calls) if number % 2 else list(reversed(calls)):
                taken[name].append(self._turn(calls[name], times))
        return taken

    def _turn(self, call: Callable[[], Any], times: int) -> float:
        self._barrier()
        began = time.perf_counter()
        for _ in range(times):
            call()
        return self._slowest((time.perf_counter() - began) / times * 1e6)


def turns_of_meshdist(warm_up: int, most_times: int) -> Turns:
    """Return the turns of ranks that are in a world of meshdist."""
    return Turns(dist.barrier, lambda number: float(dist.all_reduce(np.array([number]), "max")[0]), warm_up, most_times)


def join_torch() -> bool:
    """On all ranks: make a world of torch over Gloo with the same ranks; return whether torch is installed."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    ranks = dist.get_world_size()
    store = torch.distributed.FileStore(f"{folder[0]}/store", ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=dist.get_rank(), world_size=ranks)
    torch.distributed.barrier()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return True


def leave_torch() -> None:
    """End the world of `join_torch`."""
    import torch.distributed

    torch.distributed.destroy_process_group()
