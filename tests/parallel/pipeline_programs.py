"""A network of linear stages in whole numbers, which a pipeline must compute to the last bit, as one process does."""

from __future__ import annotations

import numpy as np

import meshdist as dist
from meshdist.parallel import PipelineRunner, PipelineStage, Schedule

ROWS_PER_MICROBATCH, WIDTH = 2, 3


def weights_of(stage):
    """Return whole numbers, small enough for exact sums."""
    return np.random.default_rng(stage).integers(-1, 2, (WIDTH, WIDTH)).astype(float)


def batch_of(num_microbatches):
    rng = np.random.default_rng(99)
    rows = ROWS_PER_MICROBATCH * num_microbatches
    return rng.integers(-2, 3, (rows, WIDTH)).astype(float), rng.integers(-2, 3, (rows, WIDTH)).astype(float)


def forward(x, w):
    y = np.maximum(x @ w + 1, 0)
    return y, (x, y)


def loss(y, target):
    return ((y - target) ** 2).sum(), 2 * (y - target)


def stage_of(number, kinds="both"):
    """Return a stage with a whole backward pass, with its halves, or with both."""
    w = weights_of(number)

    def backward_input(saved, dy):
        x, y = saved
        dz = dy * (y > 0)
        return dz @ w.T, (x, dz)

    def backward_weight(rest):
        x, dz = rest
        return {"w": x.T @ dz, "b": dz.sum(axis=0)}

    def backward(saved, dy):
        dx, rest = backward_input(saved, dy)
        return dx, backward_weight(rest)

    whole = {"backward": backward} if kinds in ("whole", "both") else {}
    halves = {"backward_input": backward_input, "backward_weight": backward_weight} if kinds != "whole" else {}
    return PipelineStage(lambda x: forward(x, w), **whole, **halves)


def reference(num_stages, num_microbatches):
    """Return outputs, the loss of each micro-batch and the gradients of each stage, of the batch as a whole."""
    x, target = batch_of(num_microbatches)
    saved = []
    for number in range(num_stages):
        x, kept = forward(x, weights_of(number))
        saved.append(kept)
    losses = [loss(*parts)[0] for parts in zip(*(np.split(a, num_microbatches) for a in (x, target)), strict=True)]
    outputs, dy, gradients = x, loss(x, target)[1], {}
    for number in reversed(range(num_stages)):
        dy, gradients[number] = stage_of(number, "whole").backward(saved[number], dy)
    return outputs, losses, gradients


def trained(csv, kinds="both", steps=2):
    """Run a schedule as CSV over all ranks, and return what each rank has after the last step."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    schedule = Schedule.from_text(csv)
    x, target = batch_of(schedule.num_microbatches)
    stages = {number: stage_of(number, kinds) for number in schedule.stages_of(dist.get_rank())}
    runner = PipelineRunner(stages, schedule, mesh["pp"], loss=loss, scale_grads=False)
    for _ in range(steps):
        step = runner.step(x, target)
    return tuple(step)


def assert_as_one_process(schedule, results):
    """Compare what the ranks have with one process, to the last bit."""
    outputs, losses, gradients = reference(schedule.num_stages, schedule.num_microbatches)
    last = schedule.rank_of(schedule.num_stages - 1)
    for rank, (rank_outputs, rank_losses, rank_gradients) in enumerate(results):
        assert tuple(sorted(rank_gradients)) == schedule.stages_of(rank)
        for stage, found in rank_gradients.items():
            for name in ("w", "b"):
                np.testing.assert_array_equal(found[name], gradients[stage][name])
        if rank == last:
            np.testing.assert_array_equal(rank_outputs, outputs)
            assert rank_losses == losses
        else:
            assert rank_outputs is None
            assert rank_losses is None
