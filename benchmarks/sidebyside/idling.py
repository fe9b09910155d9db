"""Two ranks of which one waits for messages, for `waiting.py`: python -m sidebyside.idling SCRIPT WAIT,... MESSAGES."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from statistics import median
from time import perf_counter, process_time, sleep

import numpy as np

from sidebyside.contender import Contender

_WARMUPS = 100


def wait_for(contender: Contender, wait_s: float, messages: int) -> tuple[float, float]:
    """Return the median of the times there and back, and the share of a processor that the last rank has used."""
    ping = contender.send_recv(np.zeros(1), np.zeros(1))
    for _ in range(_WARMUPS):
        ping()
    contender.barrier()()
    used, began, times = process_time(), perf_counter(), []
    for _ in range(messages):
        if contender.rank == 0:
            sleep(wait_s)
        begin = perf_counter()
        ping()
        times.append(perf_counter() - begin)
    share = np.array([(process_time() - used) / (perf_counter() - began)])
    share_of_other = np.zeros(1)
    contender.exchange(share, share_of_other)()
    return median(times), float(share_of_other[0])


def main() -> None:
    script, waits, messages = sys.argv[1:]
    contender: Contender = import_module(f"sidebyside.contender_{script}").join()
    found = [wait_for(contender, float(wait_s), int(messages)) for wait_s in waits.split(",")]
    if contender.rank == 0:
        print(json.dumps(found))
    contender.leave()


if __name__ == "__main__":
    main()
