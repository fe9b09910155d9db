"""The training of train_transformer.py by hand: the same network and losses, with the calls of the flat API alone.

Here each product has its two gradients written out, each sum along "tp" its call, forward and backward; the pipeline is
a loop of sends and receives (GPipe), and the gradients are averaged along "dp" in one flat array. There are no other
schedules, no sequence parallelism, no sharded optimizer and no checkpoints.
"""

import argparse
import math
from time import perf_counter
from typing import Any

import numpy as np
from digits_tools import progress
from transformer_network import Array, Network, block_of, first_values, parameters_of
from transformer_tools import adam, batch_of, learning_rate, load_text

import meshdist as dist

EPS = 1e-5  # of the norms


class Stage:
    """A stage of the pipeline: its forward and backward pass, and the sums of its gradients over micro-batches."""

    def __init__(self, network: Network, pp: dist.DeviceMesh, dtype: str) -> None:
        self.network, self.tp = network, network.tp
        self.is_first, self.is_last = pp.get_local_rank() == 0, pp.get_local_rank() == pp.size() - 1
        self.layers = [f"layers.{number}" for number in network.layers_of(pp.get_local_rank(), pp.size())]
        blocks = {
            name: block_of(network, spec, first_values(network, name, spec, dtype))
            for name, spec in parameters_of(network, pp.get_local_rank(), pp.size()).items()
        }
        ends = np.cumsum([block.size for block in blocks.values()])
        self.flat = np.concatenate([block.ravel() for block in blocks.values()])
        self.flat_gradients = np.zeros_like(self.flat)
        self.parameters, self.gradients = (
            {
                name: piece.reshape(block.shape)  # views
                for (name, block), piece in zip(blocks.items(), np.split(flat, ends[:-1]), strict=True)
            }
            for flat in (self.flat, self.flat_gradients)
        )

    # ---- Forward: each part returns its output, and what its backward pass needs

    def forward(self, x: Array) -> tuple[Array, list[Any]]:
        saved: list[Any] = []
        if self.is_first:
            saved.append(x)
            x = self.embedding(x)
        for name in self.layers:
            attended, of_attention = self.attention(name, x)
            x = x + attended
            added, of_mlp = self.mlp(name, x)
            x = x + added
            saved += [of_attention, of_mlp]
        if self.is_last:
            x, of_norm = self.norm("norm", x)
            saved.append((of_norm, x))
            x = x @ self.parameters["head"]
        return x, saved

    def embedding(self, tokens: Array) -> Array:
        rows, inside = self.own_rows(tokens.ravel())
        x = self.parameters["tokens"][rows] * inside[:, None]
        dist.all_reduce(x, group=self.tp)
        x.reshape(*tokens.shape, -1)[...] += self.parameters["positions"]
        return x

    def own_rows(self, tokens: Array) -> tuple[Array, Array]:
        """Return the tokens' rows in this rank's block of the vocabulary, 0 outside of it, and which are inside."""
        size = self.network.vocabulary // self.tp.size()
        rows = tokens - self.tp.get_local_rank() * size
        inside = (rows >= 0) & (rows < size)
        return np.where(inside, rows, 0), inside

    def norm(self, name: str, x: Array) -> tuple[Array, Any]:
        centred = x - x.mean(axis=-1, keepdims=True)
        inverse = 1 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + EPS)
        normal = centred * inverse
        return normal * self.parameters[name], (normal, inverse)

    def attention(self, name: str, x: Array) -> tuple[Array, Any]:
        x, of_norm = self.norm(f"{name}.attention.norm", x)
        q, k, v = self.heads(x @ self.matrix(f"{name}.qkv"), 3)
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        scores += np.triu(np.full(scores.shape[-2:], -np.inf, scores.dtype), 1)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = (shares @ v).swapaxes(1, 2).reshape(len(x), -1)
        y = mixed @ self.parameters[f"{name}.out"]
        dist.all_reduce(y, group=self.tp)
        return y, (of_norm, x, q, k, v, shares, mixed)

    def heads(self, x: Array, parts: int) -> list[Array]:
        """Cut rows of tokens into arrays (B, heads, T, size)."""
        size = self.network.width // self.network.heads
        return np.split(x.reshape(-1, self.network.context, x.shape[1] // size, size).swapaxes(1, 2), parts, axis=1)

    def matrix(self, name: str) -> Array:
        return self.parameters[name].reshape(self.network.width, -1)

    def mlp(self, name: str, x: Array) -> tuple[Array, Any]:
        x, of_norm = self.norm(f"{name}.mlp.norm", x)
        positive = np.maximum(x @ self.parameters[f"{name}.up"] + self.parameters[f"{name}.up.bias"], 0)
        hidden = positive * positive
        y = hidden @ self.parameters[f"{name}.down"]
        dist.all_reduce(y, group=self.tp)
        return y, (of_norm, x, positive, hidden)

    def loss(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        """Return the mean cross-entropy and its gradient; each rank has the logits of its part of the vocabulary."""
        top = logits.max(axis=1)
        dist.all_reduce(top, "max", group=self.tp)
        shares = np.exp(logits - top[:, None])
        columns, inside = self.own_rows(targets.ravel())
        rows = np.arange(len(columns))
        sums = np.stack([shares.sum(axis=1), (logits[rows, columns] - top) * inside])
        dist.all_reduce(sums, group=self.tp)
        shares /= sums[0][:, None]
        shares[rows, columns] -= inside
        return np.mean(np.log(sums[0]) - sums[1]), shares / len(rows)

    # ---- Backward: each part takes the gradient of its output, adds those of its parameters, returns that of its input

    def backward(self, saved: list[Any], dy: Array) -> Array | None:
        if self.is_last:
            of_norm, x = saved.pop()
            self.gradients["head"] += x.T @ dy
            dx = dy @ self.parameters["head"].T
            dist.all_reduce(dx, group=self.tp)
            dy = self.norm_backward("norm", of_norm, dx)
        for name in reversed(self.layers):
            dy = dy + self.mlp_backward(name, saved.pop(), dy)
            dy = dy + self.attention_backward(name, saved.pop(), dy)
        if not self.is_first:
            return dy
        tokens = saved.pop()
        rows, inside = self.own_rows(tokens.ravel())
        np.add.at(self.gradients["tokens"], rows[inside], dy[inside])
        self.gradients["positions"] += dy.reshape(*tokens.shape, -1).sum(axis=0)
        return None

    def norm_backward(self, name: str, saved: Any, dy: Array) -> Array:
        normal, inverse = saved
        self.gradients[name] += (dy * normal).sum(axis=0)
        dy = dy * self.parameters[name]
        means = dy.mean(axis=-1, keepdims=True), (dy * normal).mean(axis=-1, keepdims=True)
        return inverse * (dy - means[0] - normal * means[1])

    def mlp_backward(self, name: str, saved: Any, dy: Array) -> Array:
        of_norm, x, positive, hidden = saved
        self.gradients[f"{name}.down"] += hidden.T @ dy
        d_hidden = 2 * (dy @ self.parameters[f"{name}.down"].T) * positive
        self.gradients[f"{name}.up"] += x.T @ d_hidden
        self.gradients[f"{name}.up.bias"] += d_hidden.sum(axis=0)
        dx = d_hidden @ self.parameters[f"{name}.up"].T
        dist.all_reduce(dx, group=self.tp)
        return self.norm_backward(f"{name}.mlp.norm", of_norm, dx)

    def attention_backward(self, name: str, saved: Any, dy: Array) -> Array:
        of_norm, x, q, k, v, shares, mixed = saved
        self.gradients[f"{name}.out"] += mixed.T @ dy
        (d_mixed,) = self.heads(dy @ self.parameters[f"{name}.out"].T, 1)
        d_v = shares.swapaxes(-1, -2) @ d_mixed
        d_shares = d_mixed @ v.swapaxes(-1, -2)
        d_scores = shares * (d_shares - (d_shares * shares).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[-1])
        d_q, d_k = d_scores @ k, d_scores.swapaxes(-1, -2) @ q
        d_qkv = np.concatenate([d_q, d_k, d_v], axis=1).swapaxes(1, 2).reshape(len(x), -1)
        self.gradients[f"{name}.qkv"] += (x.T @ d_qkv).reshape(self.parameters[f"{name}.qkv"].shape)
        dx = d_qkv @ self.matrix(f"{name}.qkv").T
        dist.all_reduce(dx, group=self.tp)
        return self.norm_backward(f"{name}.attention.norm", of_norm, dx)


def pipeline_step(stage: Stage, pp: dist.DeviceMesh, tokens: Array, targets: Array, count: int, dtype: str) -> float:
    """Take the micro-batches forward through the stages, then backward; return the mean loss, 0 before the end."""
    rank = pp.get_local_rank()
    rows = len(tokens) // count
    shape = rows * tokens.shape[1], stage.network.width
    saved, gradients, losses, sends = [], [], [], []
    for x, target in zip(np.split(tokens, count), np.split(targets, count), strict=True):
        if not stage.is_first:
            x = np.empty(shape, dtype)
            dist.recv(x, group=pp, group_src=rank - 1)
        y, of_this = stage.forward(x)
        saved.append(of_this)
        if stage.is_last:
            loss, gradient = stage.loss(y, target)
            losses.append(loss)
            gradients.append(gradient)
        else:
            sends.append(dist.isend(y, group=pp, group_dst=rank + 1))
    for number in range(count):
        if stage.is_last:
            dy = gradients[number]
        else:
            dy = np.empty(shape, dtype)
            dist.recv(dy, group=pp, group_src=rank + 1)
        dx = stage.backward(saved[number], dy)
        if dx is not None:
            sends.append(dist.isend(dx, group=pp, group_dst=rank - 1))
    for work in sends:
        work.wait()
    return float(np.mean(losses)) if losses else 0.0


def train(mesh: dist.DeviceMesh, args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss of every global batch, and the speed."""
    dp, tp, pp = mesh["dp"], mesh["tp"], mesh["pp"]
    sizes = {"context": args.context, "width": args.width, "heads": args.heads, "layers": args.layers}
    stage = Stage(Network(tp, **sizes, seed=args.seed), pp, args.dtype)
    count = args.micro_batches or (1 if pp.size() == 1 else 2 * pp.size())
    text, state = load_text(), dict[str, Array]()
    rows = np.split(np.arange(args.batch), dp.size())[dp.get_local_rank()]
    losses: list[float] = []
    mesh.barrier()
    began = perf_counter()
    for number, _ in enumerate(progress(args.steps, losses) if mesh.get_rank() == 0 else range(args.steps), 1):
        tokens, following = batch_of(text, number, args.batch, args.context, args.seed)
        stage.flat_gradients.fill(0)
        loss = np.array(pipeline_step(stage, pp, tokens[rows], following[rows], count, args.dtype))
        stage.flat_gradients /= count
        dist.all_reduce(stage.flat_gradients, "avg", group=dp)
        adam(stage.flat, stage.flat_gradients, state, learning_rate(number, args.steps, args.lr), number)
        dist.broadcast(loss, group=pp, group_src=pp.size() - 1)
        dist.all_reduce(loss, "avg", group=dp)
        losses.append(float(loss))
    mesh_text = f"{dp.size()}x{tp.size()}x{pp.size()}"
    return {
        "mesh": mesh_text,
        "dtype": args.dtype,
        "losses": losses,
        "steps_per_s": args.steps / (perf_counter() - began),
    }
