"""What every rank of soak.py does."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import meshdist as dist
from soaking.held import held
from soaking.player import Player


def main(rank: int, seed: int, first: int, seconds: float, steps: int, timeout_s: float, folder: str) -> None:
    """Play one program after the other until the time of rank 0 is over; write what was done into a file.

    Args:
        rank: This one.
        seed: Of all programs.
        first: Number of the first one.
        seconds: For how long.
        steps: Calls of a program.
        timeout_s: Of the groups: what waits longer has hung.
        folder: Where the file goes.
    """

    def start() -> None:
        dist.init_process_group("gloo", timeout=timeout_s)

    moments: dict[str, dict[str, int]] = {}
    start()
    player = Player(seed, start)
    began = time.monotonic()
    number = first
    more = np.array([True])
    while more[0]:
        player.play(number, steps)
        number += 1
        played_s = time.monotonic() - began
        more[0] = played_s < seconds
        for moment, due_s in (("after the first program", 0.0), ("at half time", seconds / 2)):
            if played_s >= due_s and moment not in moments:
                moments[moment] = held()
        dist.broadcast(more, 0)
        if rank == 0 and sys.stderr.isatty():
            print(f"\r{number - first} programs", end="", file=sys.stderr)
    moments["at the end"] = held()  # rank 0 knows when that is
    done = {
        "programs": number - first,
        "calls": player.num_calls,
        "async": player.num_async,
        "bytes": player.num_bytes,
        "held": moments,
    }
    dist.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    number, seed, first, seconds, steps, timeout_s, folder = sys.argv[1:]
    main(int(number), int(seed), int(first), float(seconds), int(steps), float(timeout_s), folder)
