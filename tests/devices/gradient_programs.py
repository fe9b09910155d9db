"""Gradients by CuPy's arrays, of functions and through collectives, for a real GPU and for the stand-in."""

import autograd.numpy as anp
import numpy as np

from meshdist import autograd
from meshdist.autograd import all_gather, all_reduce, all_to_all, broadcast, copy, grad, permute, reduce_scatter
from meshdist.parallel import (
    column_parallel,
    layer_norm,
    ring_attention,
    row_parallel,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

# Functions of an array of 4 rows and 6 columns, a matrix of 6 by 3, and integers.
FUNCTIONS = {
    "products": lambda x, w, i: anp.sum(anp.tanh(x @ w) ** 2) + anp.sum(anp.dot(x, w)) + anp.sum(anp.outer(x[0], x[1])),
    "exponentials": lambda x, w, i: anp.mean(anp.exp(x[:, :3]) / (1 + anp.abs(x[:, 3:]))) + anp.sum((x * x + 1) ** x),
    "softmax": lambda x, w, i: anp.sum(anp.exp(x - anp.max(x, axis=-1, keepdims=True)) / anp.sum(anp.exp(x), axis=0)),
    "rows that repeat": lambda x, w, i: anp.sum(x[i] * anp.sin(x[i])),
    "a mask": lambda x, w, i: anp.sum(x[x > 0] ** 2),
    "a slice": lambda x, w, i: anp.sum(x[1:3, ::2] * 2 + x[0, 0]),
    "where": lambda x, w, i: anp.sum(anp.where(x > 0, x, 0.1 * x)),
    "joined": lambda x, w, i: anp.sum(anp.concatenate([x, x * 2], axis=1) ** 2) + anp.sum(anp.stack([x, x]) ** 2),
    "split": lambda x, w, i: anp.sum(anp.split(x, 3, axis=1)[1] ** 2),
    "swapped": lambda x, w, i: anp.sum(anp.swapaxes(x, 0, 1) @ x) + anp.sum(x.reshape(-1, 2).T[0] ** 2),
    "einsum": lambda x, w, i: anp.sum(anp.einsum("ij,jk->ik", x, w) ** 2) + anp.sum(anp.tensordot(x, w, 1) ** 2),
    "variances": lambda x, w, i: anp.sum(anp.var(x, axis=1)) + anp.std(x),
    "limits": lambda x, w, i: anp.sum(anp.maximum(x, 0) ** 2) + anp.sum(anp.clip(x, -1, 1) ** 2) + anp.min(x),
    "scans": lambda x, w, i: anp.sum(anp.cumsum(x, axis=1) ** 2) + anp.prod(x[:1, :3]),
    "repeated": lambda x, w, i: anp.sum(anp.repeat(x, 2, axis=0) ** 2) + anp.sum(anp.tile(x, (2, 1)) ** 3),
    "rolled": lambda x, w, i: anp.sum(anp.roll(x, 1, axis=1) * x) + anp.sum(anp.pad(x, 1, "constant") ** 2),
    "broadcast": lambda x, w, i: anp.sum((x + x[0]) ** 2 * x[:, :1]) + anp.sum(1.0 / (2.5 + anp.sin(x)) - x * 3),
    "stacks of matrices": lambda x, w, i: anp.sum(anp.matmul(x.reshape(2, 2, 6), w) ** 2),
    "linear algebra": lambda x, w, i: anp.linalg.norm(x) + anp.sum(anp.linalg.solve(x[:, :4], x[:, 4:])),
    "complex": lambda x, w, i: anp.sum(anp.real((x * (1 + 2j)) * anp.conj((x * 1j + x)[i])[0])),
    "second derivatives": lambda x, w, i: anp.sum(grad(lambda x: anp.sum(anp.tanh(x[i]) ** 3))(x) ** 2),
}


def arguments():
    rng = np.random.default_rng(0)
    return rng.standard_normal((4, 6)), rng.standard_normal((6, 3)), np.array([2, 0, 2])


def of_collectives(tp):
    """Return functions of arrays, by name, with their arguments, in which all ranks along `tp` take part."""
    rank, size, rng = tp.get_local_rank(), tp.size(), np.random.default_rng(1)
    x, a, b = rng.standard_normal((4, 6)), rng.standard_normal((6, 8)), rng.standard_normal((8, 6))
    bias, gain, table = rng.standard_normal(8), rng.standard_normal(6), rng.standard_normal((12, 6))
    own, tokens, targets = rank + 1.5, np.arange(8) % 12, np.arange(4) * 3 % 12

    def cut(array, dim):
        return np.split(array, size, axis=dim)[rank].copy()

    def layers(x, a, bias, b):
        return anp.sum(row_parallel(anp.tanh(column_parallel(x, a, bias, axis=tp)), b, axis=tp) ** 2)

    def in_sequence(x, a, b):
        hidden = anp.tanh(column_parallel(x, a, axis=tp, sequence_parallel=True))
        return anp.sum(row_parallel(hidden, b, axis=tp, sequence_parallel=True) ** 2)

    def message(x):
        if rank == 0:
            return autograd.send(x * x, group=tp, group_dst=1)
        return anp.sum(autograd.recv(x, group=tp, group_src=0) ** 3) if rank == 1 else anp.sum(x)

    return {
        "all_reduce": (lambda x: anp.sum(all_reduce(x * x, "sum", tp)), x),
        "avg": (lambda x: anp.sum(all_reduce(x * x, "avg", tp, grad="reduce")) * own, x),
        "max": (lambda x: anp.sum(all_reduce(x * own, "max", tp)), x),
        "copy": (lambda x: anp.sum(all_reduce(copy(x, tp) * own, "sum", tp)), x),
        "all_gather": (lambda x: anp.sum(all_gather(x, tp, axis=0) ** 2) * own + anp.sum(all_gather(x, tp)[0]), x),
        "reduce_scatter": (lambda x: anp.sum(reduce_scatter(x * x, "sum", tp) ** 2), x),
        "all_to_all": (lambda x: anp.sum(all_to_all(x, tp) ** 2), x),
        "broadcast": (lambda x: anp.sum(broadcast(x, group=tp, group_src=0) ** 2) * own, x),
        "permute": (lambda x: anp.sum(permute(x * x, 1, tp)) * own, x),
        "send": (message, x),
        "layers": (layers, x, cut(a, 1), cut(bias, 0), cut(b, 0)),
        "sequence parallel": (in_sequence, x, cut(a, 1), cut(b, 0)),
        "layer_norm": (lambda x, gain: anp.sum(layer_norm(x, gain, axis=tp) ** 3), x, gain),
        "attention": (
            lambda q, k, v: anp.sum(ring_attention(q, k, v, axis=tp, causal=True) ** 2),
            *rng.standard_normal((3, 1, 2, 4, 3)),
        ),
        "embedding": (lambda t: anp.sum(vocab_parallel_embedding(tokens, t, axis=tp) ** 2), cut(table, 0)),
        "losses": (
            lambda logits: anp.mean(vocab_parallel_cross_entropy(logits, targets, axis=tp)),
            cut(np.concatenate([x, -x], axis=1), 1),
        ),
    }


def gradients_through_collectives(mesh, xp=np):
    """Return, as NumPy arrays by name, the values and gradients of these functions on arrays of the module `xp`."""
    found = {}
    for name, (function, *given) in of_collectives(mesh["tp"]).items():
        value, gradients = autograd.value_and_grad(function, range(len(given)))(*map(xp.asarray, given))
        assert all(type(gradient) is xp.ndarray for gradient in gradients), name
        found[name] = [x.get() if hasattr(x, "get") else np.asarray(x) for x in (value, *gradients)]
    return found
