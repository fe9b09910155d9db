"""Draws docs/images/profile.svg, what four ranks were at in two steps of a ring and a sum.

chrt -r 10 meshrun -n 4 docs/draw_profile.py

What the ranks compute is a sleep here, other programs come after them, and the quietest of some recordings is drawn:
so the times are those of a machine with a core for each rank, which this one need not have.
"""

from pathlib import Path
from time import sleep

import numpy as np

import meshdist as dist

DOCS = Path(__file__).parent
COMPUTE_S = 0.008  # in each of the four parts of a step
LATE_S = 0.008  # rank 2, in the second step
NUMBERS = 700_000
RECORDINGS = 30

ring = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
me, size = ring.get_local_rank(), ring.size()
here, coming, total = np.ones(NUMBERS), np.ones(NUMBERS), np.ones(NUMBERS // 50)


def step(is_late: bool) -> None:
    """Pass blocks once around the ring while computing with them, then add up what was found."""
    global here, coming
    for _ in range(size - 1):
        works = [ring.irecv(coming, src=(me - 1) % size), ring.isend(here, dst=(me + 1) % size)]
        sleep(COMPUTE_S)
        for work in works:
            work.wait()
        here, coming = coming, here
    sleep(COMPUTE_S + is_late * LATE_S)
    ring.all_reduce(total)


step(False)  # a group connects at its first call
quietest, least_ns = None, 0
for _ in range(RECORDINGS):
    ring.barrier()
    with dist.profile() as p:
        step(False)
        step(me == 2)
    timeline = p.merged()
    if timeline is not None:  # on rank 0
        # The time in calls after all ranks have come: on a busy machine, a rank also waits for a core.
        sums = (event for event in timeline if event.is_collective)
        busy_ns = sum(event.held_ns - (event.wait_ns or 0) for event in sums)
        if quietest is None or busy_ns < least_ns:
            quietest, least_ns = timeline, busy_ns
if quietest is not None:
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "meshdist", "svg.fonttype": "path"})
    quietest.plot().figure.savefig(DOCS / "images" / "profile.svg", metadata={"Date": None})
dist.destroy_process_group()
