"""A script written for torch.distributed, with only its two imports changed.

    meshrun -n 4 examples/classic.py

With the lines that the comments name it runs under torchrun, on torch's tensors. With `import torch` and meshdist it
runs as well: the arrays are torch's then, and meshdist works on their memory. The last digits may differ, as each sums
in an order of its own.
"""

import numpy as torch  # was: import torch

import meshdist as dist  # was: import torch.distributed as dist

FEATURES, ROWS, STEPS = 3, 8, 60


def make_data(size):
    """Return inputs and targets, one block for each rank, as if rank 0 had read them from a file."""
    numbers = torch.arange(size * ROWS * FEATURES, dtype=torch.float64)
    inputs = torch.sin(numbers * numbers).reshape(size, ROWS, FEATURES)
    weights = torch.arange(1, FEATURES + 1, dtype=torch.float64)
    return inputs, inputs @ weights + 0.5


def scatter_data(rank, size):
    x = torch.zeros((ROWS, FEATURES), dtype=torch.float64)
    y = torch.zeros((ROWS,), dtype=torch.float64)
    if rank == 0:
        inputs, targets = make_data(size)
        dist.scatter(x, list(inputs), src=0)
        dist.scatter(y, list(targets), src=0)
    else:
        dist.scatter(x, src=0)
        dist.scatter(y, src=0)
    return x, y


def average_gradients(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
        gradient /= dist.get_world_size()


def train(rank, size):
    x, y = scatter_data(rank, size)
    weights = torch.full((FEATURES,), float(rank), dtype=torch.float64)
    bias = torch.full((1,), float(rank), dtype=torch.float64)
    for parameter in (weights, bias):  # all ranks start with the values of rank 0
        dist.broadcast(parameter, src=0)
    losses = []
    for _ in range(STEPS):
        wrong = x @ weights + bias - y
        gradients = [x.T @ wrong / ROWS, wrong.sum().reshape(1) / ROWS]
        loss = (wrong * wrong).mean().reshape(1)
        work = dist.all_reduce(loss, async_op=True)
        average_gradients(gradients)
        weights -= gradients[0]
        bias -= gradients[1]
        work.wait()
        losses.append(float(loss[0]) / size)
    return weights, bias, losses


def train_alone(size):
    """Compute the same in one process, from all data."""
    inputs, targets = make_data(size)
    x, y = inputs.reshape(size * ROWS, FEATURES), targets.reshape(size * ROWS)
    weights = torch.zeros((FEATURES,), dtype=torch.float64)
    bias = torch.zeros((1,), dtype=torch.float64)
    for _ in range(STEPS):
        wrong = x @ weights + bias - y
        weights, bias = weights - x.T @ wrong / len(y), bias - wrong.mean()
    return weights, bias


def pass_around(rank, size):
    """Send a number around a ring in which each rank adds its number; return it on rank 0."""
    token = torch.zeros((1,), dtype=torch.int64)
    if size == 1:
        return int(token[0])
    if rank > 0:
        dist.recv(token, src=rank - 1)
    token += rank
    sending = dist.isend(token, dst=(rank + 1) % size)
    if rank == 0:
        sending.wait()
        dist.recv(token, src=size - 1)
        return int(token[0])
    sending.wait()
    return None


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    weights, bias, losses = train(rank, size)

    even = dist.new_group(list(range(0, size, 2)))
    highest = torch.full((1,), rank, dtype=torch.int64)
    if rank % 2 == 0:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=even)
    everybody = [torch.zeros((FEATURES,), dtype=torch.float64) for _ in range(size)]
    dist.all_gather(everybody, weights)
    names = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    token = pass_around(rank, size)
    dist.barrier()

    if rank == 0:
        alone, bias_alone = train_alone(size)
        worst = max(float(abs(other - alone).max()) for other in everybody)
        worst = max(worst, float(abs(bias - bias_alone).max()))
        print("names:", ", ".join(names))
        print(f"highest even rank: {int(highest[0])}, token: {token}")
        print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")
        print("weights:", " ".join(f"{float(weight):.6f}" for weight in weights), f"bias: {float(bias[0]):.6f}")
        print("as one process:", worst < 1e-9)
        assert worst < 1e-9
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
