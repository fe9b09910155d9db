"""A rank raises if its peer gives up before their first message."""

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
LONG = 60_000


def wait_for_rank_1(group, sends):
    if sends:
        group.send(np.zeros(LONG), 1)
    group.recv(np.zeros(1), 1)


def give_up(collective_first, sends):
    group = dist.new_group(timeout=20)
    if collective_first:
        group.barrier()
    else:  # a message the other way, which makes the backend but not the channel that is waited for
        group.send(np.zeros(1), 1) if dist.get_rank() == 0 else None
        group.recv(np.zeros(1), 0) if dist.get_rank() == 1 else None
    if dist.get_rank() == 1:
        group.abort("tired of it")
    if dist.get_rank() == 0:
        # Threads have room for everything: a send waits for nobody there.
        call = "send" if sends and dist.get_backend() == "gloo" else "(send|recv)"
        with pytest.raises(dist.DistBackendError, match=f"{call} on group .*rank 1 .*tired of it"):
            wait_for_rank_1(group, sends)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("collective_first", [True, False])
def test_who_waits_is_told(world_of_several, collective_first, sends):
    world_of_several.run(give_up, collective_first, sends)
