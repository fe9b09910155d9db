"""A rank that waits for the first message of one that gives up is told, whatever the group was used for before."""

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


def give_up(collective_first):
    group = dist.new_group(timeout=20)
    if collective_first:
        group.barrier()
    else:  # a message the other way, which makes the backend but not the channel that is waited for
        group.send(np.zeros(1), 1) if dist.get_rank() == 0 else None
        group.recv(np.zeros(1), 0) if dist.get_rank() == 1 else None
    if dist.get_rank() == 1:
        group.abort("tired of it")
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1 .*tired of it"):
            group.recv(np.zeros(1), 1)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("collective_first", [True, False])
def test_who_waits_is_told(world_of_several, collective_first):
    world_of_several.run(give_up, collective_first)
