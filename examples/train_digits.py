"""Train a digit classifier on a 2-D mesh: data parallel along "dp", tensor parallel along "tp".

    meshrun --nproc-per-node 4 examples/train_digits.py --mesh 2x2
    python examples/train_digits.py
    meshrun --launcher mpi --nproc-per-node 4 examples/train_digits.py --backend mpi
    meshrun --nproc-per-node gpu examples/train_digits.py --backend nccl --device cuda

The first trains on four processes, the second on one, the third over MPI, the last on GPUs. All are the same run:
weights, batches and, up to rounding, losses do not depend on the mesh, nor on what carries it. Each rank holds B/dp
rows x of a batch of B images and H/tp of the H hidden units:

    hidden = tanh(x @ w1 + b1)    x      (B/dp, 64)     w1 (64, H/tp)  b1 (H/tp,)    column-parallel: w1 cut by columns
    logits = hidden @ w2 + b2     hidden (B/dp, H/tp)   w2 (H/tp, 10)  b2 (10,)      row-parallel: w2 cut by rows

Forward, the column-parallel layer makes some of its outputs from all of its inputs, without communication. The
row-parallel layer takes just these; what it makes are parts of a sum, which one all_reduce along "tp" completes. b2 is
whole on every rank and added once, after the sum. Backward, every rank of a "tp" group has the whole logits, so the
gradients of its own weights are local; only the gradient of x would be a sum along "tp", and no layer below needs it.
What remains is the mean over the batch: one all_reduce along "dp" averages all gradients, laid out in one flat array.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import meshdist as dist

Array = np.ndarray
Sum = Callable[[Array], Array]

PIXELS, HIDDEN, CLASSES = 64, 120, 10
BATCH, TRAIN_IMAGES = 240, 1437  # images in a global batch; images to train on: the other 360 are held out for the test
LEARNING_RATE, MOMENTUM, SEED = 0.1, 0.9, 0
LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # by meshrun, Open MPI, MPICH, Slurm


def mesh_shape(text: str | None, world_size: int) -> tuple[int, int]:
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
    if BATCH % dp or HIDDEN % tp:
        raise ValueError(f"--mesh {text}: dp must divide the {BATCH} images of a batch, tp the {HIDDEN} hidden units")
    return dp, tp


def load_digits(rng: np.random.Generator, dtype: str) -> tuple[Array, Array]:
    """Return the images as rows (1797, 64) of values from 0 to 1, and their labels (1797,), shuffled."""
    with np.load(Path(__file__).parent / "data" / "digits.npz") as digits:
        images, labels = digits["images"].reshape(-1, PIXELS), digits["labels"]
    order = rng.permutation(len(labels))
    return (images[order] / 16).astype(dtype), labels[order]


def first_weights(rng: np.random.Generator, tp_rank: int, tp_size: int) -> list[Array]:
    """Draw all weights, the same on every rank, and return this rank's w1, b1, w2 and b2."""
    w1 = rng.standard_normal((PIXELS, HIDDEN)) / math.sqrt(PIXELS)
    w2 = rng.standard_normal((HIDDEN, CLASSES)) / math.sqrt(HIDDEN)
    units = np.split(np.arange(HIDDEN), tp_size)[tp_rank]
    return [w1[:, units], np.zeros(len(units)), w2[units], np.zeros(CLASSES)]


def array_module(device: str) -> Any:
    """Return NumPy, or for "cuda" CuPy, with this rank's GPU as its device: what all arrays of the training are of."""
    if device == "cpu":
        return np
    try:
        import cupy
    except ImportError as error:
        sys.exit(f"train_digits.py: --device cuda needs CuPy: `pip install 'meshdist[cuda]'` ({error})")
    try:
        num_gpus = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        sys.exit(f"train_digits.py: --device cuda needs a GPU and its driver, CuPy finds none here ({error})")
    cupy.cuda.Device(dist.get_node_local_rank(0) % num_gpus).use()
    return cupy


def forward(weights: list[Array], x: Array, sum_over_tp: Sum, xp: Any = np) -> tuple[Array, Array]:
    """Return this rank's hidden units (rows, H/tp) and the whole logits (rows, 10)."""
    w1, b1, w2, b2 = weights
    # tanh because it is smooth: at relu's kink a rounding error flips a gradient, and runs in float32 drift apart.
    hidden = xp.tanh(x @ w1 + b1)
    return hidden, sum_over_tp(hidden @ w2) + b2


def loss_and_gradients(
    weights: list[Array], x: Array, y: Array, sum_over_tp: Sum, xp: Any = np
) -> tuple[Array, list[Array]]:
    """Return the mean cross-entropy over these rows and its gradients with respect to this rank's weights."""
    hidden, logits = forward(weights, x, sum_over_tp, xp)
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - xp.log(xp.exp(logits).sum(axis=1, keepdims=True))
    truth = xp.arange(len(y)), y
    d_logits = xp.exp(log_p) / len(y)
    d_logits[truth] -= 1 / len(y)
    d_hidden = (d_logits @ weights[2].T) * (1 - hidden**2)
    return -log_p[truth].mean(), [x.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_logits, d_logits.sum(axis=0)]


@contextmanager
def timed(seconds: list[float], xp: Any) -> Iterator[None]:
    """Append the time that the block takes; on a GPU, until all is done that was asked of it."""
    finish = (lambda: None) if xp is np else xp.cuda.get_current_stream().synchronize
    finish()
    started = perf_counter()
    yield
    finish()
    seconds.append(perf_counter() - started)


def train(mesh: dist.DeviceMesh, xp: Any, steps: int, dtype: str) -> dict[str, Any]:
    """Train, and return the loss of every global batch, the test accuracy and where the time went."""
    dp, tp, communication, training = mesh["dp"], mesh["tp"], list[float](), list[float]()

    def sum_over_tp(partial: Array) -> Array:
        with timed(communication, xp):
            return tp.all_reduce(partial)

    rng = np.random.default_rng(SEED)  # the same on every rank: shuffles the images, then draws weights, then batches
    images, labels = map(xp.asarray, load_digits(rng, dtype))
    shares = first_weights(rng, tp.get_local_rank(), tp.size())
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


def progress(steps: int, losses: list[float]) -> Iterator[int]:
    """Count the steps and show the newest loss: as a bar on a terminal, in at most five lines elsewhere."""
    count: Any = range(1, steps + 1)
    if terminal := sys.stderr.isatty():
        from tqdm import tqdm

        count = tqdm(count, unit="step")
    for step in count:
        yield step
        if terminal:
            count.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
        elif step % math.ceil(steps / 5) == 0:
            print(f"step {step} of {steps}: loss {losses[-1]:.4f}", flush=True)


def plot(run: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure  # without pyplot: drawn by Agg, no display needed

    figure = Figure(figsize=(7, 4), layout="constrained")
    figure.add_subplot(title=f"mesh {run['mesh']}", xlabel="step", ylabel="loss", yscale="log").plot(run["losses"])
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier on a 2-D mesh of ranks.")
    parser.add_argument("--mesh", metavar="DPxTP", help="ranks along dp and along tp (default: the most square split)")
    parser.add_argument("--backend", default="gloo", help="what carries the collectives (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the arrays (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="batches to train on (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="(default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write losses, accuracy and timings to this file")
    parser.add_argument("--plot", metavar="PATH", help="draw the losses into this file (needs matplotlib)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")

    xp = array_module(args.device)
    launched = any(name in os.environ for name in LAUNCHED)
    alone: dict[str, Any] = {} if launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(args.backend, **alone)
    shape = mesh_shape(args.mesh, dist.get_world_size())
    mesh = dist.init_device_mesh(args.device, shape, mesh_dim_names=("dp", "tp"))
    run = train(mesh, xp, args.steps, args.dtype)
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
