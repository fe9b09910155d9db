"""A rank of `overlap.py`: an async all_reduce, and what its caller does meanwhile. The first rank prints the times."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

import meshdist as dist

KINDS = ("matmul", "ufuncs", "Python", "waits")
Work = Callable[[], object]


def step_of(kind: str) -> Work:
    """Return a piece of work of some ten or hundred microseconds."""
    if kind == "matmul":
        a, b, c = (np.ones((128, 128), np.float32) for _ in range(3))
        return lambda: np.matmul(a, b, out=c)
    if kind == "ufuncs":
        x, y = np.ones(16_384), np.ones(16_384)
        return lambda: np.add(np.multiply(x, 0.5, out=y), x, out=y)
    if kind == "Python":
        return lambda: sum(range(2000))
    return lambda: time.sleep(0.005)


def repeated(step: Work, seconds: float) -> Work:
    """Return the work of as many steps as take about so long, the same number on all ranks."""
    dist.barrier()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        step()
        count += 1
    least = int(dist.all_reduce(np.array(count), "min"))

    def work() -> None:
        for _ in range(max(1, least)):
            step()

    return work


def timed(work: Work) -> tuple[float, float]:
    """Return the seconds of some work on this rank, all ranks beginning together, and its processor time."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - cpu


def slowest(*seconds: float) -> list[float]:
    """Return the most of all ranks, of each."""
    return dist.all_reduce(np.array(seconds), "max").tolist()


def measure(size: int, rounds: int) -> dict[str, list[list[float]]]:
    """Return, for each kind and round: all_reduce alone, its processor time, the work alone, both."""
    x = np.zeros(max(1, size // 4), np.float32)

    def alone() -> None:
        dist.all_reduce(x, async_op=True).wait()

    def with_meanwhile(work: Work) -> None:
        pending = dist.all_reduce(x, async_op=True)
        work()
        pending.wait()

    for _ in range(3):
        alone()
    (alone_s,) = slowest(median(timed(alone)[0] for _ in range(5)))
    works = {kind: repeated(step_of(kind), alone_s) for kind in KINDS}
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        turn = number % len(KINDS)  # no kind is always behind the same other one
        for kind in (*KINDS[turn:], *KINDS[:turn]):
            work = works[kind]
            both = timed(lambda work=work: with_meanwhile(work))[0]
            found[kind].append(slowest(*timed(alone), timed(work)[0], both))
    return found


def main() -> None:
    size, rounds = map(int, sys.argv[1:])
    dist.init_process_group("gloo")
    found = measure(size, rounds)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
