"""Worlds of torch.distributed: processes that are kept for the session, since torch takes a second to import."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from both_sides import Outcomes, Program, record
from worlds import CALL_TIMEOUT_S, PRELOADED, Nursery, WorkerSet, worker_rank


class TorchWorlds:
    """One world for each size, made when it is first asked for, and what the programs came to there.

    Args:
        directory: For the files that the ranks meet in.
    """

    def __init__(self, directory: Path) -> None:
        self.names: set[str] = set()
        self._directory = directory
        self._nursery = Nursery((*PRELOADED, "torch", "torch.distributed"))
        self._worker_sets: dict[int, WorkerSet] = {}
        self._outcomes: dict[tuple[Any, int], list[Outcomes]] = {}

    def outcomes(self, program: Program, size: int) -> list[Outcomes]:
        """Return what `program` comes to on each of `size` ranks; it runs once."""
        known = self._outcomes.get((program, size))
        if known is None:
            recorded = self.run(size, record, "torch", program)
            known = self._outcomes[program, size] = [outcomes for outcomes, _ in recorded]
            self.names.update(*(names for _, names in recorded))
        return known

    def alone(self, program: Program) -> list[Outcomes]:
        """Return what `program` comes to in a process of its own that is in no world."""
        with self.processes(1) as workers:
            workers.start(record, "torch", program)
            ((outcomes, names),) = workers.gather()
        self.names.update(names)
        return [outcomes]

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function` on all ranks of a world and return what each returned."""
        workers = self._worker_sets.pop(size, None) or self.processes(size)
        try:
            workers.start(_joined, f"file://{self._directory}/{uuid4()}", size, function, args)
            results = workers.gather()
        except BaseException:
            workers.close()  # the next who asks gets new ones
            raise
        self._worker_sets[size] = workers
        return results

    def processes(self, size: int) -> WorkerSet:
        """Return processes that have torch, and no world yet."""
        return WorkerSet(self._nursery, size, {"GLOO_SOCKET_IFNAME": "lo"})

    def close(self) -> None:
        """End all processes."""
        for workers in self._worker_sets.values():
            workers.close()
        self._nursery.close()


def _joined(meeting: str, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch

    if not torch.distributed.is_initialized():
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", meeting, rank=worker_rank(), world_size=size, timeout=timedelta(seconds=CALL_TIMEOUT_S)
        )
    return function(*args)
