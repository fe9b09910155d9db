"""The network and the data of train_digits.py: two layers, split over the ranks of a "tp" group.

Each rank holds B/dp rows x of a batch of B images and H/tp of the H hidden units:

    hidden = tanh(x @ w1 + b1)    x      (B/dp, 64)     w1 (64, H/tp)  b1 (H/tp,)    column-parallel: columns of w1
    logits = hidden @ w2 + b2     hidden (B/dp, H/tp)   w2 (H/tp, 10)  b2 (10,)      row-parallel: rows of w2

Forward, the column-parallel layer makes some of its outputs from all of its inputs, without communication. The
row-parallel layer takes these outputs and yields parts of a sum, which one all_reduce along "tp" completes. b2 is
replicated and added once, after the sum. Backward, every rank of a "tp" group has the whole logits, so the
gradients of its own weights are local; only the gradient of x would be a sum along "tp", and no layer below needs it.
What remains is the mean over the batch: one all_reduce along "dp" averages all gradients, laid out in one flat array.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
Sum = Callable[[Array], Array]

PIXELS, HIDDEN, CLASSES = 64, 120, 10
BATCH, TRAIN_IMAGES = 240, 1437  # images in a global batch; images to train on: the other 360 are held out for the test
LEARNING_RATE, MOMENTUM = 0.1, 0.9


def load_digits(rng: np.random.Generator, dtype: str) -> tuple[Array, Array]:
    """Return the images as rows (1797, 64) of values from 0 to 1, and their labels (1797,), shuffled."""
    with np.load(Path(__file__).parent / "data" / "digits.npz") as digits:
        images, labels = digits["images"].reshape(-1, PIXELS), digits["labels"]
    order = rng.permutation(len(labels))
    return (images[order] / 16).astype(dtype), labels[order]


def first_weights(rng: np.random.Generator, tp_rank: int, tp_size: int, num_hidden: int = HIDDEN) -> list[Array]:
    """Draw all weights, the same on every rank, and return this rank's w1, b1, w2 and b2."""
    w1 = rng.standard_normal((PIXELS, num_hidden)) / math.sqrt(PIXELS)
    w2 = rng.standard_normal((num_hidden, CLASSES)) / math.sqrt(num_hidden)
    units = np.split(np.arange(num_hidden), tp_size)[tp_rank]
    return [w1[:, units], np.zeros(len(units)), w2[units], np.zeros(CLASSES)]


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
