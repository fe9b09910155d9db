"""On a rank: make a call that is going to fail, and say how it failed and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from worlds import report

import meshdist


class Failure(NamedTuple):
    """How a call ended. Times are of `time.monotonic()`, which all processes of a host share."""

    began_s: float
    ended_s: float
    kind: type[BaseException] | None
    message: str

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


def on_threads(program: Callable[..., Any], size: int, timeout_s: float, args: tuple[Any, ...] = ()) -> list[Any]:
    """Run `program` on ranks that are threads; of a process that has no other threads, if the test needs that."""
    return meshdist.run(program, size, args, timeout=timeout_s)


def start(new_workers, program, size, backend, *args, timeout_s=300.0):
    """Begin a program in processes that have no other threads, which might still make a call.

    Returns a function that waits for the outcomes, by rank.
    """
    if backend == "threads":
        workers = new_workers(1, "gloo", join=False)
        workers.start(on_threads, program, size, timeout_s, args)
        return lambda: workers.outcome(0)
    workers = new_workers(size, backend, timeout_s=timeout_s)
    workers.start(program, *args)
    return lambda: [workers.outcome(rank) for rank in range(size)]


def outcomes_of(new_workers, program, size, backend, timeout_s=300.0):
    """Run a program so to its end; return what it came to on each rank."""
    return start(new_workers, program, size, backend, timeout_s=timeout_s)()


def attempt(call: Callable[[], Any], announce: bool = False) -> Failure:
    """Make the call; with `announce`, tell the test before."""
    began_s = time.monotonic()
    try:
        if announce:
            report("about to call")
        result = call()
    except BaseException as error:  # KeyboardInterrupt is one of those wanted
        return Failure(began_s, time.monotonic(), type(error), str(error))
    return Failure(began_s, time.monotonic(), None, f"returned {result!r}")
