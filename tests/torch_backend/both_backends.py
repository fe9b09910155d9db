"""Worlds of torch.distributed over Gloo and over meshdist: processes that are kept for the session."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from worlds import CALL_TIMEOUT_S, PRELOADED, Nursery, WorkerSet, worker_rank

# With torch._dynamo, which DistributedDataParallel imports when it is first used.
_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)


class BothBackends:
    """One world for each backend and size, made when it is first asked for.

    Args:
        directory: For the files that the ranks meet in.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nursery = Nursery((*PRELOADED, *_MODULES, "meshdist.torch"))
        self._worker_sets: dict[tuple[str, int], WorkerSet] = {}

    def run(self, backend: str, size: int, program: str, *args: Any) -> list[Any]:
        """Run the program of this name in torch_programs.py on all ranks, and return what each returned."""
        workers = self._worker_sets.pop((backend, size), None) or self.processes(size)
        try:
            workers.start(run_program, backend, self.meeting(), size, program, args)
            results = workers.gather()
        except BaseException:
            workers.close()  # the next who asks gets new ones
            raise
        self._worker_sets[backend, size] = workers
        return results

    def processes(self, size: int) -> WorkerSet:
        """Return processes that have torch, and no world yet."""
        # One thread, since others are processes that import torch.
        return WorkerSet(self._nursery, size, {"GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"})

    def meeting(self) -> str:
        """Return a new place where ranks can meet."""
        return f"file://{self._directory}/{uuid4()}"

    def close(self) -> None:
        """End all processes."""
        for workers in self._worker_sets.values():
            workers.close()
        self._nursery.close()


def run_program(backend: str, meeting: str, size: int, program: str, args: tuple[Any, ...]) -> Any:
    """On a rank: join the world of torch, unless this process is in it already, and run the program."""
    join(backend, meeting, size)
    function: Callable[..., Any] = getattr(import_module("torch_programs"), program)
    return function(*args)


def join(backend: str, meeting: str, size: int, timeout_s: float = CALL_TIMEOUT_S) -> None:
    """On a rank: initialize torch.distributed, unless that was done."""
    torch = import_module("torch")
    import_module("meshdist.torch")
    if not torch.distributed.is_initialized():
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            backend, meeting, rank=worker_rank(), world_size=size, timeout=timedelta(seconds=timeout_s)
        )
