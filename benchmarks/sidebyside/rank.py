"""A rank under test: does what the driver says, and blocks on a socket meanwhile, so that it costs the others nothing.

Run by the library's launcher as `python -m sidebyside.rank SCRIPT ADDRESS`.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Client, Connection
from time import perf_counter

from sidebyside.cases import Case, Kept, prepare
from sidebyside.contender import Call, Contender, nothing


def timed(contender: Contender, call: Call, iterations: int) -> float:
    """Return the seconds that this rank takes for so many calls, all ranks beginning together.

    A tenth as many calls before that bring code and data back into the caches, where other libraries' have been.
    """
    barrier = contender.barrier()
    for _ in range(max(1, iterations // 10)):
        call()
    barrier()
    started = perf_counter()
    for _ in range(iterations):
        call()
    elapsed = perf_counter() - started
    # No rank leaves the library's calls, and goes to sleep, while a peer may still need it to move data along.
    barrier()
    return elapsed


def obey(contender: Contender, driver: Connection) -> None:
    """Carry out the driver's orders until it closes the connection."""
    call: Call = nothing
    kept: dict[Case, Call] = {}
    while True:
        try:
            order = driver.recv()
        except EOFError:
            return
        try:
            if isinstance(order, Kept):
                if order.case not in kept:
                    kept[order.case] = prepare(contender, order.case)
                call = kept[order.case]
                answer: float | str = 0.0
            elif isinstance(order, Case):
                call = nothing  # frees the arrays of the case before
                call = prepare(contender, order)
                answer = 0.0
            else:
                answer = timed(contender, call, order)
        except Exception:
            answer = traceback.format_exc()
        driver.send(answer)


def main() -> None:
    script, address = sys.argv[1:]
    contender: Contender = import_module(f"sidebyside.contender_{script}").join()
    with Client(address, family="AF_UNIX") as driver:
        driver.send((contender.rank, os.getpid()))
        obey(contender, driver)
    contender.leave()


if __name__ == "__main__":
    main()
