"""Train a digit classifier on a 2-D mesh: data parallel along "dp", tensor parallel along "tp".

    meshrun -n 4 examples/train_digits.py --mesh 2x2
    python examples/train_digits.py
    meshrun --launcher mpi -n 4 examples/train_digits.py --backend mpi
    meshrun -n gpu examples/train_digits.py --backend nccl --device cuda

The first trains on four processes, the second on one, the third over MPI, the last on GPUs. All are the same run:
weights, batches and, up to rounding, losses do not depend on the mesh, nor on what carries it. The network, and what of
it each rank has, is in digits_network.py; what surrounds a training is in digits_tools.py.

There are two calls in a step: along "tp" the parts of the logits are summed, along "dp" all gradients are averaged.
"""

import argparse
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from digits_network import (
    BATCH,
    HIDDEN,
    LEARNING_RATE,
    MOMENTUM,
    TRAIN_IMAGES,
    Array,
    first_weights,
    forward,
    load_digits,
    loss_and_gradients,
)
from digits_tools import array_module, plot, progress, timed

import meshdist as dist

SEED = 0
LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # by meshrun, Open MPI, MPICH, Slurm


def mesh_shape(text: str | None, world_size: int, num_hidden: int = HIDDEN) -> tuple[int, int]:
    """Check `--mesh DPxTP` against the number of ranks; without it, take the most square split."""
    if text is None:
        tp = max(n for n in range(1, math.isqrt(world_size) + 1) if world_size % n == 0)
        text = f"{world_size // tp}x{tp}"
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if match is None:
        raise ValueError(f"--mesh must be DPxTP, two positive numbers such as 2x2, got {text!r}")
    dp, tp = int(match[1]), int(match[2])
    if dp * tp != world_size:
        raise ValueError(f"--mesh {text} needs {dp * tp} ranks, but {world_size} run; set --nproc-per-node {dp * tp}")
    if BATCH % dp or num_hidden % tp:
        raise ValueError(
            f"--mesh {text}: dp must divide the {BATCH} images of a batch, tp the {num_hidden} hidden units"
        )
    return dp, tp


def train(mesh: dist.DeviceMesh, xp: Any, steps: int, dtype: str, num_hidden: int = HIDDEN) -> dict[str, Any]:
    """Train, and return the loss of every global batch, the test accuracy and where the time went."""
    dp, tp, communication, training = mesh["dp"], mesh["tp"], list[float](), list[float]()

    def sum_over_tp(partial: Array) -> Array:
        with timed(communication, xp):
            return tp.all_reduce(partial)

    rng = np.random.default_rng(SEED)  # the same on every rank: shuffles the images, then draws weights, then batches
    images, labels = map(xp.asarray, load_digits(rng, dtype))
    shares = first_weights(rng, tp.get_local_rank(), tp.size(), num_hidden)
    flat = xp.asarray(np.concatenate([share.ravel() for share in shares]).astype(dtype))
    pieces = xp.split(flat, np.cumsum([share.size for share in shares])[:-1].tolist())
    weights = [piece.reshape(share.shape) for piece, share in zip(pieces, shares, strict=True)]  # views into flat
    velocity = xp.zeros_like(flat)
    averaged = xp.empty(flat.size + 1, dtype)  # what a step averages along dp: all gradients and, last, the loss
    rows = np.split(np.arange(BATCH), dp.size())[dp.get_local_rank()]
    losses: list[float] = []

    dp.barrier()
    tp.barrier()  # a group connects at its first call, which must not count as training
    with timed(training, xp):
        for _ in progress(steps, losses) if mesh.get_rank() == 0 else range(steps):
            batch = xp.asarray(rng.integers(TRAIN_IMAGES, size=BATCH)[rows])
            loss, gradients = loss_and_gradients(weights, images[batch], labels[batch], sum_over_tp, xp)
            xp.concatenate([*(gradient.ravel() for gradient in gradients), loss.reshape(1)], out=averaged)
            with timed(communication, xp):
                dp.all_reduce(averaged, op="avg")
            velocity = MOMENTUM * velocity + averaged[:-1]
            flat -= LEARNING_RATE * velocity
            losses.append(float(averaged[-1]))
    comm_share = mesh.all_reduce(xp.array([sum(communication) / sum(training)]), op="avg")[0]

    held_out = xp.asarray(np.array_split(np.arange(TRAIN_IMAGES, len(labels)), dp.size())[dp.get_local_rank()])
    guesses = forward(weights, images[held_out], sum_over_tp, xp)[1].argmax(axis=1)
    right = dp.all_reduce(xp.array([int((guesses == labels[held_out]).sum())]))[0]
    quality = {"losses": losses, "test_accuracy": float(right) / (len(labels) - TRAIN_IMAGES)}
    speed = {"steps_per_s": steps / sum(training), "comm_share": float(comm_share)}
    return {"mesh": f"{dp.size()}x{tp.size()}", "dtype": dtype, **quality, **speed}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier on a 2-D mesh of ranks.")
    parser.add_argument("--mesh", metavar="DPxTP", help="ranks along dp and along tp (default: the most square split)")
    parser.add_argument("--backend", default="gloo", help="what carries the collectives (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the arrays (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="batches to train on (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="hidden units (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="(default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write losses, accuracy and timings to this file")
    parser.add_argument("--plot", metavar="PATH", help="draw the losses into this file (needs matplotlib)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.hidden < 1:
        parser.error(f"--hidden must be at least 1, got {args.hidden}")

    xp = array_module(args.device)
    launched = any(name in os.environ for name in LAUNCHED)
    alone: dict[str, Any] = {} if launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(args.backend, **alone)
    shape = mesh_shape(args.mesh, dist.get_world_size(), args.hidden)
    mesh = dist.init_device_mesh(args.device, shape, mesh_dim_names=("dp", "tp"))
    run = train(mesh, xp, args.steps, args.dtype, args.hidden)
    if dist.get_rank() == 0:
        run |= {"steps": args.steps, "backend": args.backend, "world_size": dist.get_world_size()}
        if args.json:
            Path(args.json).write_text(json.dumps(run) + "\n")
        if args.plot:
            plot(run, args.plot)
        print(
            "mesh {mesh} {dtype}: loss {loss:.4f}, test accuracy {test_accuracy:.1%}, {steps_per_s:.0f} steps/s, "
            "{comm_share:.0%} of the time in communication".format(loss=run["losses"][-1], **run)
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
