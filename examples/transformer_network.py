"""The network of train_transformer.py: a decoder of blocks, split into pipeline stages, each split over a "tp" group.

    tokens (B, T) -> embedding -> block -> ... -> block -> norm -> logits (B T, vocabulary)     each block:
        x = x + attention(norm(x))        x = x + mlp(norm(x))

Between the blocks, x has a row of `width` numbers for each token. Attention and MLP are two products each. The first is
column-parallel: a rank has some of the heads, or of the hidden units, and computes them for all tokens. The second is
row-parallel: it yields parts of a sum, which one all_reduce along "tp" completes. So x is the same on all ranks of the
group. With sequence parallelism it is sharded along the tokens instead: an all_gather before the first product, and a
reduce_scatter after the second, send as many bytes as the all_reduce, and norms and sums are not computed twice.

The stages are functions of their parameters and their input, written with autograd.numpy: the backward pass of all that
follows is made by meshdist.autograd, collectives included.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import autograd.numpy as np
from autograd.extend import defvjp, primitive

import meshdist as dist
from meshdist.autograd import copy, value_and_grad
from meshdist.parallel import (
    column_parallel,
    layer_norm,
    row_parallel,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

Array = Any
Parameters = dict[str, Array]


@dataclass(frozen=True)
class Network:
    """The sizes of the network, and how it is computed along "tp"."""

    tp: dist.DeviceMesh
    sequence_parallel: bool = False
    vocabulary: int = 128
    context: int = 64
    width: int = 96
    heads: int = 4
    layers: int = 4
    seed: int = 0

    @property
    def sizes(self) -> str:
        """The sizes as options; a checkpoint fits networks of the same."""
        return f"--context {self.context} --width {self.width} --heads {self.heads} --layers {self.layers}"

    def stage(self, number: int, num_stages: int) -> Callable[[Parameters, Array], Array]:
        """Return the function of a stage: from tokens (B, T), or the x of the stage before, to x or to the logits."""

        def run(parameters: Parameters, x: Array) -> Array:
            if number == 0:
                x = self.embedding(parameters, x)
            for layer in self.layers_of(number, num_stages):
                x = self.block(parameters, f"layers.{layer}", x)
            return self.logits(parameters, x) if number == num_stages - 1 else x

        return run

    def layers_of(self, stage: int, num_stages: int) -> range:
        return range(stage * self.layers // num_stages, (stage + 1) * self.layers // num_stages)

    def embedding(self, parameters: Parameters, tokens: Array) -> Array:
        places, positions = np.arange(tokens.size) % self.context, parameters["positions"]
        if self.sequence_parallel:  # this rank's tokens; copy adds the gradients of all
            places = np.split(places, self.tp.size())[self.tp.get_local_rank()]
            positions = copy(positions, self.tp)
        x = vocab_parallel_embedding(
            tokens.reshape(-1),
            parameters["tokens"],
            axis=self.tp,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocabulary,
        )
        return x + vocab_parallel_embedding(places, positions, axis=None)

    def block(self, parameters: Parameters, name: str, x: Array) -> Array:
        def p(part: str) -> Array:
            return parameters[f"{name}.{part}"]

        qkv = self.columns(self.norm(x, p("attention.norm")), p("qkv").reshape(self.width, -1))
        x = x + self.rows(self.attention(qkv), p("out"))
        hidden = self.columns(self.norm(x, p("mlp.norm")), p("up"), p("up.bias"))
        return x + self.rows(squared_relu(hidden), p("down"))

    def attention(self, qkv: Array) -> Array:
        """Let each token of a sequence take a mean of the values of those before it, in each head of this rank."""
        heads, size = self.heads // self.tp.size(), self.width // self.heads
        qkv = np.swapaxes(qkv.reshape(-1, self.context, 3 * heads, size), 1, 2)
        q, k, v = np.split(qkv, 3, axis=1)  # each (B, heads, T, size)
        shares = causal_softmax(q @ np.swapaxes(k, -1, -2), 1 / math.sqrt(size))
        return np.swapaxes(shares @ v, 1, 2).reshape(-1, heads * size)

    def logits(self, parameters: Parameters, x: Array) -> Array:
        """Return the logits of this rank's part of the vocabulary, (B T, vocabulary / tp)."""
        return self.columns(self.norm(x, parameters["norm"]), parameters["head"])

    def loss(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        """Return the mean cross-entropy of a micro-batch and its gradient by the logits."""
        return value_and_grad(self.cross_entropy)(logits, targets.reshape(-1))

    def cross_entropy(self, logits: Array, targets: Array) -> Array:
        return np.mean(vocab_parallel_cross_entropy(logits, targets, axis=self.tp))

    def norm(self, x: Array, gain: Array) -> Array:
        return layer_norm(x, gain, axis=self.tp if self.sequence_parallel else None)

    def columns(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        return column_parallel(x, weight, bias, axis=self.tp, sequence_parallel=self.sequence_parallel)

    def rows(self, x: Array, weight: Array) -> Array:
        return row_parallel(x, weight, axis=self.tp, sequence_parallel=self.sequence_parallel)


@primitive
def squared_relu(x: Array) -> Array:
    positive = np.maximum(x, 0)
    return positive * positive


defvjp(squared_relu, lambda _, x: lambda g: 2 * g * np.maximum(x, 0))


@primitive
def causal_softmax(scores: Array, scale: float) -> Array:
    """Return the softmax of scale * scores along the last dimension, where row t sees the first t + 1 columns only."""
    shares = scores * scale
    shares += np.triu(np.full_like(scores, -np.inf, shape=scores.shape[-2:]), 1)
    shares -= shares.max(axis=-1, keepdims=True)
    np.exp(shares, out=shares)
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def causal_softmax_vjp(shares: Array, scores: Array, scale: float) -> Callable[[Array], Array]:
    return lambda g: shares * (g - np.sum(g * shares, axis=-1, keepdims=True)) * scale


defvjp(causal_softmax, causal_softmax_vjp)


# ---- Parameters


class Parameter(NamedTuple):
    """A parameter of the whole network: its shape, the scale of its first values, and the dimension that tp shards."""

    shape: tuple[int, ...]
    scale: float | None  # None: ones
    cut: int | None


def parameters_of(network: Network, stage: int, num_stages: int) -> dict[str, Parameter]:
    """Return the parameters of a stage by name; the names are those of the whole network."""
    width, hidden = network.width, 4 * network.width
    inwards = 1 / math.sqrt(width)
    back = inwards / math.sqrt(2 * network.layers)  # what is added to x adds up over the layers
    found = {}
    if stage == 0:
        found["tokens"] = Parameter((network.vocabulary, width), 0.1, 0)
        found["positions"] = Parameter((network.context, width), 0.1, None)
    for layer in network.layers_of(stage, num_stages):
        found |= {
            f"layers.{layer}.attention.norm": Parameter((width,), None, None),
            f"layers.{layer}.qkv": Parameter((width, 3, width), inwards, 2),
            f"layers.{layer}.out": Parameter((width, width), back, 0),
            f"layers.{layer}.mlp.norm": Parameter((width,), None, None),
            f"layers.{layer}.up": Parameter((width, hidden), inwards, 1),
            f"layers.{layer}.up.bias": Parameter((hidden,), 0.0, 0),
            f"layers.{layer}.down": Parameter((hidden, width), back / 2, 0),
        }
    if stage == num_stages - 1:
        found["norm"] = Parameter((width,), None, None)
        found["head"] = Parameter((width, network.vocabulary), inwards, 1)
    return found


def first_values(network: Network, name: str, parameter: Parameter, dtype: str) -> Array:
    """Draw a whole parameter, from its name alone: the same on every rank of every mesh."""
    if parameter.scale is None:
        return np.ones(parameter.shape, dtype)
    rng = np.random.default_rng([network.seed, *name.encode()])
    return (parameter.scale * rng.standard_normal(parameter.shape)).astype(dtype)


def block_of(network: Network, parameter: Parameter, whole: Array) -> Array:
    """Return this rank's block of a whole parameter."""
    if parameter.cut is None:
        return whole.copy()
    return np.split(whole, network.tp.size(), axis=parameter.cut)[network.tp.get_local_rank()].copy()
