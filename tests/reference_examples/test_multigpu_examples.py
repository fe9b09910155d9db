"""The documented example of processes that hold several arrays each; the pages have one for each of eight GPUs."""

import numpy as np
import pytest
from documented import check
from worlds import worker_rank

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
NUM_DEVICES = 8


def all_reduce_ones(init_method, size):
    dist.init_process_group(backend="gloo", init_method=init_method, world_size=size, rank=worker_rank())
    tensor_list = [np.ones(1, np.float32) for _ in range(NUM_DEVICES)]
    dist.all_reduce_multigpu(tensor_list)
    dist.destroy_process_group()
    return [tensor.item() for tensor in tensor_list]


def test_all_reduce_multigpu(bare, tmp_path):
    bare.start(all_reduce_ones, f"file://{tmp_path}/distributed_test", bare.size)
    total = NUM_DEVICES * bare.size
    assert total == {2: 16}.get(bare.size, total)
    assert bare.gather() == [[total] * NUM_DEVICES] * bare.size


def the_rest():
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [np.array([rank * 2 + device]) for device in range(2)]
    dist.broadcast_multigpu(sent, src=1, src_tensor=1)
    reduced = [np.array([rank * 2 + device]) for device in range(2)]
    dist.reduce_multigpu(reduced, dst=0, dst_tensor=1)
    gathered = [[np.zeros(1, np.int64) for _ in range(2 * size)] for _ in range(2)]
    dist.all_gather_multigpu(gathered, [np.array([rank * 2 + device]) for device in range(2)])
    parts = [np.zeros(1, np.int64) for _ in range(2)]
    dist.reduce_scatter_multigpu(parts, [[np.array([place]) for place in range(2 * size)] for _ in range(2)])
    numbers = [[array.item() for array in arrays] for arrays in gathered]
    return [x.item() for x in sent], reduced[1].item() if rank == 0 else None, numbers, [x.item() for x in parts]


def test_the_other_multigpu_functions(initialised):
    size = initialised.size
    expected = [
        (
            [3, 3],
            sum(range(2 * size)) if rank == 0 else None,
            [list(range(2 * size))] * 2,
            [2 * size * (2 * rank), 2 * size * (2 * rank + 1)],
        )
        for rank in range(size)
    ]
    check(initialised, the_rest, expected)
