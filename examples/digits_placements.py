"""Train the network of train_digits.py with placements only: no collective is called.

    meshrun -n 4 examples/digits_placements.py --mesh 2x2
    python examples/digits_placements.py

The images are sharded along "dp", the hidden units along "tp"; the rest is NumPy for the whole arrays, as on one rank.
The products over a sharded dimension are pending sums, which are computed where something needs them: the logits along
"tp", the gradients along "dp". So losses and accuracy are those of train_digits.py for every mesh, up to rounding.

The price: a step computes six sums, the logits, four gradients and the loss, where train_digits.py makes two calls.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from digits_network import BATCH, LEARNING_RATE, MOMENTUM, TRAIN_IMAGES, first_weights, load_digits
from digits_tools import progress
from train_digits import LAUNCHED, SEED, mesh_shape

import meshdist as dist
from meshdist.tensor import DTensor, Shard, distribute_tensor

Arrays = list[DTensor]
# From weights, images and classes of a batch to the loss and the gradients of the weights.
Differentiate = Callable[[Arrays, DTensor, DTensor], tuple[Any, Arrays]]


def forward(weights: Arrays, x: DTensor) -> tuple[DTensor, DTensor]:
    """Return the hidden units, sharded along dp and tp, and the logits, sharded along dp."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1 + b1)
    # The logits are used several times: their sum along tp is computed once, here.
    return hidden, (hidden @ w2 + b2).redistribute({"dp": Shard(0)})


def loss_and_gradients(weights: Arrays, x: DTensor, y: DTensor) -> tuple[Any, Arrays]:
    """Return the mean cross-entropy of a batch and its gradients; `y` has a row of 0 and 1 for each image."""
    hidden, logits = forward(weights, x)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    d_logits = (np.exp(log_p) - y) / len(y)
    d_hidden = (d_logits @ weights[2].T) * (1 - hidden**2)
    loss = -(log_p * y).sum() / len(y)
    return loss, [x.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_logits, d_logits.sum(axis=0)]


def train(
    mesh: dist.DeviceMesh, steps: int, dtype: str, differentiate: Differentiate = loss_and_gradients
) -> dict[str, Any]:
    """Train, and return the loss of every batch and the test accuracy."""
    rng = np.random.default_rng(SEED)  # the same on every rank, as in train_digits.py
    images, labels = load_digits(rng, dtype)
    classes = np.eye(10, dtype=dtype)[labels]
    units = [{"tp": Shard(1)}, {"tp": Shard(0)}, {"tp": Shard(0)}, {}]  # of w1, b1, w2 and b2
    weights = [
        distribute_tensor(weight.astype(dtype), mesh, placements, src_data_rank=None)
        for weight, placements in zip(first_weights(rng, 0, 1), units, strict=True)
    ]
    velocities = [np.zeros_like(weight) for weight in weights]
    losses: list[float] = []

    def shard(rows: np.ndarray) -> DTensor:
        return distribute_tensor(rows, mesh, {"dp": Shard(0)}, src_data_rank=None)

    for _ in progress(steps, losses) if mesh.get_rank() == 0 else range(steps):
        batch = rng.integers(TRAIN_IMAGES, size=BATCH)
        loss, gradients = differentiate(weights, shard(images[batch]), shard(classes[batch]))
        for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
            velocity *= MOMENTUM
            velocity += gradient
            weight -= LEARNING_RATE * velocity
        losses.append(float(loss))

    guesses = forward(weights, shard(images[TRAIN_IMAGES:]))[1].argmax(axis=1)
    accuracy = float(np.mean(guesses == shard(labels[TRAIN_IMAGES:])))
    return {"mesh": "x".join(map(str, mesh.shape)), "dtype": dtype, "losses": losses, "test_accuracy": accuracy}


def main(differentiate: Differentiate = loss_and_gradients) -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier with arrays over a 2-D mesh.")
    parser.add_argument("--mesh", metavar="DPxTP", help="ranks along dp and along tp (default: the most square split)")
    parser.add_argument("--steps", type=int, default=600, help="batches to train on (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="(default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write losses and accuracy to this file")
    args = parser.parse_args()

    launched = any(name in os.environ for name in LAUNCHED)
    alone: dict[str, Any] = {} if launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    mesh = dist.init_device_mesh("cpu", mesh_shape(args.mesh, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    run = train(mesh, args.steps, args.dtype, differentiate)
    if dist.get_rank() == 0:
        if args.json:
            Path(args.json).write_text(json.dumps(run) + "\n")
        print(
            "mesh {mesh} {dtype}: loss {loss:.4f}, test accuracy {test_accuracy:.1%}".format(
                loss=run["losses"][-1], **run
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
