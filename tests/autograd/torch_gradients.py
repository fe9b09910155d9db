"""A program for one rank of torch: gradients through torch's collectives, written to a file by rank."""

import sys
import warnings
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nn


def cases(rank, size):
    """Yield names with functions of a tensor, as `collective_cases` of the test has them for arrays."""
    world = dist.group.WORLD
    yield "all_reduce sum", nn.all_reduce
    yield "broadcast", lambda x: nn.broadcast(x, 1)
    yield "all_gather", lambda x: torch.cat(nn.all_gather(x))
    yield "all_to_all_single", lambda x: nn.all_to_all_single(torch.empty_like(x), x)
    yield "gathered", lambda x: funcol.all_gather_tensor_autograd(x, 0, world)
    yield "scattered", lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world)
    yield "exchanged", lambda x: funcol.all_to_all_single_autograd(x, None, None, world)


def main(rank, size, rendezvous, output):
    warnings.simplefilter("ignore")
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=limit)
    found = {}
    for name, function in cases(rank, size):
        x = torch.tensor(np.random.default_rng(rank).standard_normal((4 * size, 2)), requires_grad=True)
        y = function(x)
        weights = torch.tensor(np.random.default_rng(10 + rank).standard_normal(tuple(y.shape)))
        (weights * torch.tanh(y)).sum().backward()
        found[name] = x.grad.numpy()
    np.savez(f"{output}-{rank}.npz", **found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
