"""A rank is killed at any moment of the start: the others raise in time, name it, and leave nothing."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys

import numpy as np
import pytest
from trying import attempt
from until import loaded
from worlds import worker_rank

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
exhaustive = pytest.mark.exhaustive
TIMEOUT_S, DETECTED_S = 3.0, 1.0
PHASES = ["init", "group", "mesh", "call", "after"]


def die_after(num_calls):
    """Kill this process once it has called so many functions of Python."""
    left = [num_calls]

    def count(frame, event, arg):
        if event == "call":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def start(url, victim, phase, num_calls):
    rank = worker_rank()
    steps = {
        "init": lambda: dist.init_process_group("gloo", url, rank=rank, world_size=3, timeout=TIMEOUT_S),
        "group": lambda: dist.new_group([0, 1, 2]),
        "mesh": lambda: dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",)),
        "call": lambda: dist.all_reduce(np.ones(1000)),
        "after": lambda: [dist.all_reduce(np.ones(1000)) for _ in range(3)],
    }
    for name in PHASES:
        if rank == victim and name == phase:
            die_after(num_calls)
        failure = attempt(steps[name])
        if rank == victim and name == phase:
            os.kill(os.getpid(), signal.SIGKILL)
        if failure.kind is not None:
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    return name, failure


# What CI kills: a rank that has left its card and is not counted yet, and each rank in each later phase.
CHOSEN = [("init", 1500, 2), *((phase, 100, victim) for phase in ("group", "mesh", "call") for victim in (0, 2))]
MOMENTS = [
    pytest.param(*moment, id=" ".join(map(str, moment)), marks=() if moment in CHOSEN else exhaustive)
    for moment in itertools.product(PHASES[:4], [0, 1, 30, 100, 300, 800, 1500, 3000], [0, 2])
]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "num_calls", "victim"), MOMENTS)
def test_a_rank_is_killed_while_the_ranks_start(new_workers, port, phase, num_calls, victim):
    workers = new_workers(3, join=False)
    workers.start(start, f"tcp://127.0.0.1:{port}", victim, phase, num_calls)
    assert workers.ended(victim)
    others = [rank for rank in range(3) if rank != victim]
    for name, failure in (workers.outcome(rank) for rank in others):
        assert issubclass(failure.kind, dist.DistError), failure
        if name == "init":  # a rank that nobody has heard of, or the store's, is waited for
            assert failure.took_s < loaded(TIMEOUT_S * 1.1 + 1.0), failure
        else:
            assert failure.took_s < loaded(DETECTED_S), (name, failure)
        known = rf"rank {victim}\b" + (r"|store at 127.0.0.1|store answered at 127.0.0.1" if victim == 0 else "")
        assert re.search(known, failure.message), (name, failure)
