"""What the ranks of the tests run; the workers import it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import meshdist as dist

LONG_S = 60.0


def sums(offset: float = 0.0) -> tuple[int, list[float]]:
    return dist.get_rank(), dist.all_reduce(np.full(2, dist.get_rank() + offset)).tolist()


def one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such batch")
    dist.barrier()


def one_dies() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def doubled(x: Any, other: Any) -> tuple[tuple[int, ...], Any, Any, float]:
    return x.to_local().shape, x * 2, other, float(x.sum().full_tensor())


def pending_sum(x: Any) -> dict[str, Any]:
    return {"sum": x.sum(axis=0)}


def computes_for_long(directory: str) -> None:
    dist.barrier()
    Path(directory, str(dist.get_rank())).touch()
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        threading.Event().wait(0.01)


def one_is_stuck(fifo: str, rank: int, holds_gil: bool) -> None:
    if dist.get_rank() == rank:  # in native code, until the test opens the other end
        os.close(ctypes.PyDLL(None).open(fifo.encode(), os.O_RDONLY) if holds_gil else os.open(fifo, os.O_RDONLY))
    dist.barrier()


def left_overs() -> tuple[bool, list[str], list[str]]:
    threads = [thread.name for thread in threading.enumerate() if "meshdist" in thread.name]
    shared = [str(path) for path in Path("/dev/shm").glob(f"*{os.getpid()}*")]
    return dist.is_initialized(), threads, shared


def one_returns_a_lock() -> Any:
    return {"lock": threading.Lock() if dist.get_rank() == 1 else None}


class WorkersOnly:
    """What the workers can pickle, and no client can unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getpid, (1, 2)


def returns_workers_only() -> WorkersOnly:
    return WorkersOnly()


class Pair(NamedTuple):
    first: Any
    second: Any


def nested_sums(pair: Pair, *, more: dict[str, list[Any]]) -> list[tuple[str, float]]:
    values = [*pair, *more["more"]]
    return [(type(value).__name__, float(value.sum().full_tensor())) for value in values]


def big(num_bytes: int) -> dict[str, Any]:
    return {"array": np.full(num_bytes, dist.get_rank(), np.uint8), "strided": np.arange(12).reshape(3, 4)[:, ::2]}
