"""What the pages say about backends of third parties: registered by name, then used by that name."""

import numpy as np
import pytest
from documented import check, place
from worlds import worker_rank

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


def register_and_run(init_method, size):
    made = []

    def create(store, rank, size, timeout):
        made.append((rank, size, timeout.total_seconds()))
        raise NotImplementedError("the example ends where the engine would be made")

    dist.Backend.register_backend("ring", create, devices=["cpu"])
    assert dist.Backend("RING") == dist.Backend.RING == "ring"
    with pytest.raises(dist.DistBackendError, match="the example ends"):
        dist.init_process_group("ring", init_method, timeout=20, rank=worker_rank(), world_size=size)
    return made


def test_backend_of_a_third_party(bare, tmp_path):
    bare.start(register_and_run, f"file://{tmp_path}/store", bare.size)
    assert bare.gather() == [[(rank, bare.size, 20.0)] for rank in range(bare.size)]


def group_of_another_backend():
    rank, _ = place()
    group = dist.new_group(backend=dist.Backend.GLOO)
    x = np.array([rank])
    dist.all_reduce(x, group=group)
    return dist.get_backend(group), x.item()


def test_backend_by_attribute(initialised):
    check(initialised, group_of_another_backend, [("gloo", sum(range(initialised.size)))] * initialised.size)
