"""The layers of tensor and sequence parallelism compute what one process does, in value and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import meshdist
from meshdist.autograd import all_gather, all_reduce, grad, value_and_grad
from meshdist.parallel import (
    column_parallel,
    layer_norm,
    row_parallel,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from meshdist.tensor import Shard, distribute_tensor

SEQUENCE, BATCH, FEATURES, HIDDEN = 12, 2, 3, 7  # HIDDEN in blocks of unequal sizes
RANKS = (1, 2, 3, 4)


def block(length: int, rank: int, size: int) -> slice:
    rows = -(-length // size)  # torch.chunk's
    return slice(min(rows * rank, length), min(rows * (rank + 1), length))


def parameters(vocabulary: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        "table": (vocabulary, FEATURES),
        "gain": (FEATURES,),
        "shift": (FEATURES,),
        "w1": (FEATURES, HIDDEN),
        "b1": (HIDDEN,),
        "w2": (HIDDEN, FEATURES),
        "b2": (FEATURES,),
        "head": (FEATURES, vocabulary),
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def cut(tree: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    vocabulary, hidden = block(len(tree["table"]), rank, size), block(HIDDEN, rank, size)
    return {
        **tree,
        "table": tree["table"][vocabulary],
        "w1": tree["w1"][:, hidden],
        "b1": tree["b1"][hidden],
        "w2": tree["w2"][hidden],
        "head": tree["head"][:, vocabulary],
    }


def transformer_loss(p: dict[str, Any], tokens: Any, targets: Any, axis: Any, sequence: bool, vocabulary: int) -> Any:
    cutting: dict[str, Any] = {"axis": axis, "sequence_parallel": sequence}
    x = vocab_parallel_embedding(tokens, p["table"], vocab_size=vocabulary, **cutting)
    y = layer_norm(x, p["gain"], p["shift"], axis=axis if sequence else None)
    y = anp.tanh(column_parallel(y, p["w1"], p["b1"], **cutting))
    x = x + row_parallel(y, p["w2"], p["b2"], **cutting)
    logits = column_parallel(x, p["head"], **cutting)
    return anp.mean(vocab_parallel_cross_entropy(logits, targets, axis=axis, vocab_size=vocabulary))


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("vocabulary", [12, 10, 5])  # of 4 ranks, the last have 1 row of 10 and none of 5
def test_every_world_has_the_loss_and_the_gradients_of_one_process(size: int, sequence: bool, vocabulary: int) -> None:
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(0, vocabulary, (2, SEQUENCE, BATCH))
    whole = parameters(vocabulary)
    loss, gradients = value_and_grad(transformer_loss)(whole, tokens, targets, None, False, vocabulary)

    def main() -> None:
        mesh = meshdist.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        mine = cut(whole, mesh.get_rank(), size)
        found = value_and_grad(transformer_loss)(mine, tokens, targets, mesh["tp"], sequence, vocabulary)
        assert np.isclose(found[0], loss, rtol=1e-13)
        for name, wanted in cut(gradients, mesh.get_rank(), size).items():
            assert found[1][name].shape == wanted.shape, name
            assert np.allclose(found[1][name], wanted, rtol=1e-12, atol=1e-14), name

    meshdist.run(main, size, timeout=60)


def test_one_process_computes_the_textbook_formulas() -> None:
    rng = np.random.default_rng(2)
    x, gain, bias, logits = (rng.standard_normal(shape) for shape in ((5, 4), 4, 4, (3, 5, 6)))
    targets = rng.integers(0, 6, (3, 5))
    centred = x - x.mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1) * gain + bias
    assert np.allclose(layer_norm(x, gain, bias, eps=0.1), wanted, rtol=1e-13)
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = np.take_along_axis(softmax, targets[..., None], -1)[..., 0]
    assert np.allclose(vocab_parallel_cross_entropy(logits, targets, axis=None), -np.log(picked), rtol=1e-13)
    assert np.array_equal(vocab_parallel_embedding(targets, logits[0].T, axis=None), logits[0].T[targets])
    assert np.allclose(column_parallel(logits, logits[0].T, bias=x[:, 0], axis=None), logits @ logits[0].T + x[:, 0])
    assert np.isclose(vocab_parallel_cross_entropy(logits[0, 0], np.int64(2), axis=None), -np.log(softmax[0, 0, 2]))


def differentiable_parts(size: int, rank: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return functions, and arguments of which each rank has its block, or which are the same on all ranks."""
    rng = np.random.default_rng(3)
    own = np.random.default_rng(4 + rank)
    targets = rng.integers(0, 2 * size, (4,))
    weight = rng.standard_normal((4, 2 * size))[:, 2 * rank : 2 * rank + 2]

    def entropy(logits: Any) -> Any:
        return anp.sum(anp.tanh(vocab_parallel_cross_entropy(logits, targets, axis=meshdist.group.WORLD)))

    def norm(x: Any, gain: Any, bias: Any) -> Any:
        scaled = layer_norm(x, gain, bias, axis=meshdist.group.WORLD)
        return all_reduce(anp.sum(anp.sin(scaled)))

    def rows(table: Any) -> Any:
        return anp.sum(anp.sin(vocab_parallel_embedding(targets, table, axis=meshdist.group.WORLD)) * 2)

    def columns(x: Any) -> Any:
        return all_reduce(anp.sum(anp.sin(column_parallel(x, weight, axis=meshdist.group.WORLD))))

    return {
        "entropy": (entropy, (own.standard_normal((4, 2)),)),
        "norm": (norm, (own.standard_normal((3, 4)), rng.standard_normal(4), rng.standard_normal(4))),
        "embedding": (rows, (own.standard_normal((2, 3)),)),
        "columns": (columns, (rng.standard_normal((3, 4)),)),
    }


# What each rank has its own of, by the number of the argument; the rest is the same on all ranks.
OWN = {"entropy": (0,), "norm": (0,), "embedding": (0,), "columns": ()}


def derivative_along(function: Callable[..., Any], directions: list[Any], own: tuple[int, ...]) -> Callable[..., Any]:
    """Return the derivative along a direction of all ranks' arguments."""

    def derived(*args: Any) -> Any:
        gradients = grad(function, tuple(range(len(args))))(*args)
        parts = [anp.sum(gradient * direction) for gradient, direction in zip(gradients, directions, strict=True)]
        return sum(all_reduce(part) if number in own else part for number, part in enumerate(parts))

    return derived


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_and_second_derivatives_are_those_of_finite_differences(size: int) -> None:
    def main() -> None:
        rank = meshdist.get_rank()
        for name, (function, args) in differentiable_parts(size, rank).items():
            directions = [
                np.random.default_rng(9 + number + 7 * rank * (number in OWN[name])).standard_normal(arg.shape)
                for number, arg in enumerate(args)
            ]
            first = derivative_along(function, directions, OWN[name])
            second = derivative_along(first, directions, OWN[name])
            for derived, by in ((first, function), (second, first)):
                up, down = (
                    by(*[x + step * d for x, d in zip(args, directions, strict=True)]) for step in (1e-5, -1e-5)
                )
                assert np.isclose(derived(*args), (up - down) / 2e-5, rtol=1e-6, atol=1e-7), name

    meshdist.run(main, size, timeout=60)


def volumes(account: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {name: (volume["calls"], volume["nbytes"]) for name, volume in account.items()}


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_what_a_pair_of_layers_sends(sequence: bool) -> None:
    def main() -> tuple[dict[str, Any], dict[str, Any]]:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        cutting: dict[str, Any] = {"axis": mesh["tp"], "sequence_parallel": sequence}
        a, b = np.ones((8, 16)), np.ones((16, 8))

        def pair(x: Any) -> Any:
            return anp.sum(row_parallel(anp.tanh(column_parallel(x, a, **cutting)), b, **cutting))

        x = np.ones((5 if sequence else 10, 8))
        with mesh.account() as forward:
            pair(x)
        with mesh.account() as both:
            grad(pair)(x)
        return forward.as_dict()["tp"], both.as_dict()["tp"]

    whole = 10 * 8 * 8
    forward, both = meshdist.run(main, 2)[0]
    calls = ("all_gather_into_tensor", "reduce_scatter_tensor") if sequence else ("all_reduce",)
    assert volumes(forward) == dict.fromkeys(calls, (1, whole))
    assert volumes(both) == dict.fromkeys(calls, (2, 2 * whole))


def test_a_loss_sends_three_numbers_for_each_target_and_nothing_backward() -> None:
    def main() -> dict[str, Any]:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        logits, targets = np.ones((6, 5)), np.arange(6)
        with mesh.account() as account:
            grad(lambda x: anp.sum(vocab_parallel_cross_entropy(x, targets, axis=mesh["tp"], vocab_size=10)))(logits)
        return account.as_dict()["tp"]

    found = meshdist.run(main, 2)[0]
    assert volumes(found) == {"all_reduce": (2, 6 * 3 * 8)}


def test_a_loss_of_large_logits_is_finite_and_exact() -> None:
    def main() -> Any:
        rank = meshdist.get_rank()
        logits = np.array([[1e4, 0.0], [0.0, -1e30], [0.0, 0.0]])[:, ::-1] * (1 - rank)
        gradient = grad(
            lambda x: anp.sum(vocab_parallel_cross_entropy(x, np.array([1, 0, 3]), axis=meshdist.group.WORLD))
        )
        small = np.full((1, 2), -np.inf if rank else 30.0, np.float32) + np.float32([[0, -12]])
        loss = vocab_parallel_cross_entropy(small, np.array([0]), axis=meshdist.group.WORLD)
        half = vocab_parallel_cross_entropy(np.ones((1, 2), np.float16), np.array([0]), axis=meshdist.group.WORLD)
        assert (
            grad(lambda x: anp.sum(vocab_parallel_cross_entropy(x, np.array([0]), axis=None)))(
                np.ones((1, 2), np.float16)
            ).dtype
            == np.float16
        )
        return gradient(logits).round(6).tolist(), loss, half

    (gradient, loss, half), (other, *_) = meshdist.run(main, 2)
    third, quarter = round(1 / 3, 6), 0.25
    assert gradient == [[0, 0], [-1, third], [quarter, quarter]]
    assert other == [[0, 0], [third, third], [quarter, -3 * quarter]]
    assert loss.dtype == np.float32
    assert np.isclose(loss[0], np.log1p(np.exp(-12.0)), rtol=1e-2)
    assert half.dtype == np.float32
    assert np.isclose(half[0], np.log(4))


def test_what_is_wrong_is_named() -> None:
    def main() -> None:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        tp, rank = mesh["tp"], mesh.get_rank()
        ones = np.ones
        here = rf"on group .* \(rank {rank} of 2\): "
        wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, r"\(5, 3\) has 3 features, and weight of shape \(4, 2\) takes 4",
             lambda: column_parallel(ones((5, 3)), ones((4, 2)), axis=tp)),
            (ValueError, "weight must have 2 dimensions", lambda: row_parallel(ones(3), ones(3), axis=tp)),
            (ValueError, r"bias must have shape \(2,\)",
             lambda: row_parallel(ones((5, 3)), ones((3, 2)), ones(3), axis=tp)),
            (ValueError, "split into 2 equal blocks; pad it to 6",
             lambda: row_parallel(ones((5, 3)), ones((3, 2)), axis=tp, sequence_parallel=True)),
            (ValueError, "sequence_dim must be a dimension before",
             lambda: column_parallel(ones((4, 3)), ones((3, 2)), axis=tp, sequence_parallel=True, sequence_dim=-1)),
            (TypeError, "x must be of a floating dtype, got int64",
             lambda: column_parallel(ones((5, 4), int), ones((4, 2)), axis=tp)),
            (TypeError, "weight must be an array, got a list",
             lambda: column_parallel(ones((5, 4)), [[1.0]], axis=tp)),
            (ValueError, r"indices\[1\] is 8, and must be 0 to 7, in the vocabulary of 2 blocks of 4 .*; 1 of 2 are",
             lambda: vocab_parallel_embedding(np.array([7, 8]), ones((4, 3)), axis=tp)),
            (ValueError, r"targets\[0, 1\] is -1, and must be 0 to 7, in the vocabulary of 2 blocks of 4",
             lambda: vocab_parallel_cross_entropy(ones((1, 2, 4)), np.array([[0, -1]]), axis=tp)),
            (ValueError, r"targets must have shape \(2,\)",
             lambda: vocab_parallel_cross_entropy(ones((2, 4)), np.array([[0, 1]]), axis=tp)),
            (TypeError, "targets must be of an integer dtype",
             lambda: vocab_parallel_cross_entropy(ones((2, 4)), ones(2), axis=tp)),
            (ValueError, "table must have . rows, this rank's block of a vocabulary of 7 in blocks of 4, 3",
             lambda: vocab_parallel_embedding(np.array([0]), ones((3 + rank, 3)), axis=tp, vocab_size=7)),
            (ValueError, "table must have the same number of rows on all ranks, and they have 3 to 4",
             lambda: vocab_parallel_embedding(np.array([3]), ones((4 - rank, 3)), axis=tp)),
            (ValueError, "logits must have the same number of columns on all ranks, and they have 3 to 4",
             lambda: vocab_parallel_cross_entropy(ones((1, 4 - rank)), np.array([0]), axis=tp)),
            (ValueError, r"gain must have shape \(3,\), the last dimension of x \(2, 3\)",
             lambda: layer_norm(ones((2, 3)), ones(2), axis=tp)),
            (TypeError, r"x is a DTensor, and the layer takes blocks; write x @ weight \+ bias",
             lambda: column_parallel(distribute_tensor(ones((2, 2)), mesh, {"tp": Shard(0)}), ones((2, 2)), axis=tp)),
        ]  # fmt: skip
        with pytest.raises(TypeError, match=r"row_parallel: axis must be .* mesh\['tp'\], or None, got 'tp'"):
            row_parallel(ones((5, 3)), ones((3, 2)), axis="tp")  # type: ignore[arg-type]
        for kind, words, call in wrong:
            with pytest.raises(kind, match=here + ".*" + words):
                call()

    meshdist.run(main, 2)


def test_with_debug_level_detail_what_must_be_replicated_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHDIST_DEBUG", "DETAIL")

    def main() -> None:
        own = float(meshdist.get_rank())
        world = meshdist.group.WORLD
        calls: dict[str, Callable[[], Any]] = {
            "x of column_parallel": lambda: column_parallel(np.full((2, 3), own), np.ones((3, 1)), axis=world),
            "gain of layer_norm": lambda: layer_norm(np.ones((2, 3)), np.full(3, own), axis=world),
            "indices of vocab_parallel_embedding": lambda: vocab_parallel_embedding(
                np.array([int(own)]), np.ones((2, 3)), axis=world
            ),
            "the gradient of the result of vocab_parallel_cross_entropy": lambda: grad(
                lambda x: own * vocab_parallel_cross_entropy(x, np.int64(0), axis=world)
            )(np.ones(2)),
        }
        for words, call in calls.items():
            with pytest.raises(meshdist.DistBackendError, match=f"{words} must be the same on all ranks"):
                call()

    meshdist.run(main, 2)


def test_layers_work_on_stages_of_a_two_dimensional_mesh() -> None:
    """Tensor parallelism along one axis, the batch along the other."""
    rng = np.random.default_rng(5)
    x, a, b = rng.standard_normal((4, 3)), rng.standard_normal((3, 4)), rng.standard_normal((4, 2))
    wanted = grad(lambda a: anp.mean((anp.tanh(x @ a) @ b) ** 2))(a)

    def main() -> None:
        mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_coordinate()
        rows, columns = slice(2 * dp, 2 * dp + 2), slice(2 * tp, 2 * tp + 2)

        def loss(a: Any) -> Any:
            hidden = anp.tanh(column_parallel(x[rows], a, axis=mesh["tp"]))
            return all_reduce(anp.mean(row_parallel(hidden, b[columns], axis=mesh["tp"]) ** 2), "avg", mesh["dp"])

        found = all_reduce(grad(loss)(a[:, columns]), "sum", mesh["dp"])
        assert np.allclose(all_gather(found, mesh["tp"], axis=1), wanted, rtol=1e-12)

    meshdist.run(main, 4)
