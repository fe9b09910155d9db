"""ring_attention over a cut sequence is attention over the whole one, in value and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import meshdist
from meshdist.autograd import all_reduce, grad
from meshdist.parallel import ring_attention, sequence_positions

LENGTH = 24


def plain_attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    """Return attention by the formula, with autograd's operations."""
    scores = anp.matmul(q, anp.swapaxes(k, -1, -2)) * scale
    if causal:
        scores = anp.where(np.tri(q.shape[2], k.shape[2], dtype=bool), scores, -1e30)
    weights = anp.exp(scores - anp.max(scores, -1, keepdims=True))
    return anp.matmul(weights / anp.sum(weights, -1, keepdims=True), v)


def queries_keys_values(length: int = LENGTH) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 3, length, size)) for size in (4, 4, 5)]


@pytest.mark.parametrize("cut", ["everything", "causal", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_world_computes_attention_over_the_whole_sequence(size: int, cut: str) -> None:
    whole, causal, zigzag = queries_keys_values(), cut != "everything", cut == "zigzag"
    weights = np.random.default_rng(1).standard_normal((2, 3, LENGTH, 5))
    wanted = plain_attention(*whole, causal, 0.7)
    gradients = grad(lambda *x: anp.sum(weights * plain_attention(*x, causal, 0.7)), (0, 1, 2))(*whole)

    def main() -> None:
        mesh = meshdist.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        mine = sequence_positions(LENGTH, axis=mesh["cp"], zigzag=zigzag)

        def attention(*x: Any) -> Any:
            return ring_attention(*x, axis=mesh["cp"], causal=causal, scale=0.7, zigzag=zigzag)

        blocks = [x[:, :, mine] for x in whole]
        assert np.allclose(attention(*blocks), wanted[:, :, mine], rtol=1e-12, atol=1e-13)
        found = grad(lambda *x: anp.sum(weights[:, :, mine] * attention(*x)), (0, 1, 2))(*blocks)
        for gradient, whole_gradient in zip(found, gradients, strict=True):
            assert np.allclose(gradient, whole_gradient[:, :, mine], rtol=1e-12, atol=1e-13)

    meshdist.run(main, size, timeout=60)


@pytest.mark.parametrize(("zigzag", "length"), [(False, 1040), (True, 2080)])
def test_chunks_of_several_tiles(zigzag: bool, length: int) -> None:
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, 1, length, 2))
    some = np.arange(0, length, 61)
    exponentials = np.exp(q[0, 0, some] @ k[0, 0].T / np.sqrt(2)) * (np.arange(length) <= some[:, None])
    wanted = exponentials @ v[0, 0] / exponentials.sum(-1, keepdims=True)

    def main() -> None:
        mine = sequence_positions(length, axis=meshdist.group.WORLD, zigzag=zigzag)
        blocks = [x[:, :, mine] for x in (q, k, v)]

        def attention(keys: Any) -> Any:
            return ring_attention(blocks[0], keys, blocks[2], axis=meshdist.group.WORLD, zigzag=zigzag)

        y = np.zeros(q.shape)
        y[:, :, mine] = attention(blocks[1])
        assert np.allclose(all_reduce(y)[0, 0, some], wanted, rtol=1e-12)
        gradient = grad(lambda keys: anp.sum(attention(keys) ** 2))(blocks[1])
        # The result does not change where all keys move alike.
        assert np.allclose(all_reduce(gradient.sum(2)), 0, atol=1e-11)

    meshdist.run(main, 2)


def test_heads_of_keys_and_values_are_shared_by_neighbouring_heads_of_queries() -> None:
    q, k, v = queries_keys_values(8)
    q = np.concatenate([q, q + 1], 1)  # 6 heads
    function = lambda q, k, v: plain_attention(q, anp.repeat(k, 2, 1), anp.repeat(v, 2, 1), True, 0.5)  # noqa: E731
    wanted, gradients = function(q, k, v), grad(lambda *x: anp.sum(function(*x) ** 2), (0, 1, 2))(q, k, v)

    def main() -> None:
        rows = slice(4 * meshdist.get_rank(), 4 * meshdist.get_rank() + 4)
        attention = lambda *x: ring_attention(*x, axis=meshdist.group.WORLD)  # noqa: E731
        blocks = [x[:, :, rows] for x in (q, k, v)]
        assert np.allclose(attention(*blocks), wanted[:, :, rows], rtol=1e-12)
        found = grad(lambda *x: anp.sum(attention(*x) ** 2), (0, 1, 2))(*blocks)
        for gradient, whole in zip(found, gradients, strict=True):
            assert np.allclose(gradient, whole[:, :, rows], rtol=1e-11, atol=1e-13)

    meshdist.run(main, 2)


def test_blocks_may_be_empty() -> None:
    def main() -> None:
        empty = np.ones((2, 4, 0, 3)), np.ones((2, 2, 0, 3)), np.ones((2, 2, 0, 5))
        attention = lambda *x: ring_attention(*x, axis=meshdist.group.WORLD, zigzag=True)  # noqa: E731
        assert attention(*empty).shape == (2, 4, 0, 5)
        found = grad(lambda *x: anp.sum(attention(*x)), (0, 1, 2))(*empty)
        assert [gradient.shape for gradient in found] == [x.shape for x in empty]

    meshdist.run(main, 2)


def test_gradients_are_those_of_finite_differences() -> None:
    def main() -> None:
        rng = np.random.default_rng(meshdist.get_rank())
        blocks, direction = rng.standard_normal((2, 3, 1, 2, 4, 3))
        function = lambda *x: all_reduce(  # noqa: E731
            anp.sum(anp.sin(ring_attention(*x, axis=meshdist.group.WORLD, zigzag=True)))
        )
        up, down = (function(*(blocks + step * direction)) for step in (1e-6, -1e-6))
        found = all_reduce(
            sum(np.sum(g * d) for g, d in zip(grad(function, (0, 1, 2))(*blocks), direction, strict=True))
        )
        assert np.isclose(found, (up - down) / 2e-6, rtol=1e-6)

    meshdist.run(main, 3)


def test_large_scores_and_other_numbers_of_queries_than_keys() -> None:
    def main() -> None:
        rank = meshdist.get_rank()
        q, k = np.full((1, 1, 3, 2), 1e4, np.float32), np.full((1, 1, 1, 2), 1e4 * rank, np.float32)
        found = ring_attention(q, k, np.full((1, 1, 1, 1), rank, np.float32), axis=meshdist.group.WORLD, causal=False)
        assert found.dtype == np.float32
        assert np.array_equal(found, np.full((1, 1, 3, 1), 2))  # the largest key's

    meshdist.run(main, 3)


def test_what_is_sent() -> None:
    def main() -> list[Any]:
        mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        blocks = np.ones((3, 1, 2, 4, 5))
        with mesh.account() as forward:
            ring_attention(*blocks, axis=mesh["cp"])
        with mesh.account() as both:
            grad(lambda q, k, v: anp.sum(ring_attention(q, k, v, axis=mesh["cp"])))(*blocks)
        return [account.as_dict()["cp"]["isend"] for account in (forward, both)]

    forward, both = meshdist.run(main, 3)[0]
    keys_and_values = 2 * (2 * 4 * 5) * 8
    assert (forward["calls"], forward["nbytes"]) == (2, 2 * keys_and_values)
    # Backward, two of keys and values, and three of their gradients.
    assert (both["calls"], both["nbytes"]) == (7, 7 * keys_and_values)


def test_ranks_whose_loss_does_not_use_the_result_take_part_in_the_backward_pass() -> None:
    whole = [x[:, :, :4] for x in queries_keys_values()]
    wanted = grad(lambda *x: anp.sum(plain_attention(*x, True, 0.5)[:, :, 2:]), (0, 1, 2))(*whole)

    def main() -> None:
        rank = meshdist.get_rank()

        def loss(*x: Any) -> Any:
            y = ring_attention(*x, axis=meshdist.group.WORLD)
            return anp.sum(y) if rank else 0.0

        rows = slice(2 * rank, 2 * rank + 2)
        found = grad(loss, (0, 1, 2))(*[x[:, :, rows] for x in whole])
        for gradient, whole_gradient in zip(found, wanted, strict=True):
            assert np.allclose(gradient, whole_gradient[:, :, rows], rtol=1e-12, atol=1e-14)

    meshdist.run(main, 2)


def test_with_debug_level_detail_the_ranks_compare_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHDIST_DEBUG", "DETAIL")

    def main() -> None:
        rank, world = meshdist.get_rank(), meshdist.group.WORLD
        q = np.ones((1, 2, 4, 3))
        calls: dict[str, Callable[[], Any]] = {
            "the shape of k": lambda: ring_attention(*[np.ones((1, 2, 4 + rank, 3))] * 3, axis=world),
            "causal, zigzag and scale": lambda: ring_attention(q, q, q, axis=world, zigzag=bool(rank)),
        }
        for words, call in calls.items():
            with pytest.raises(meshdist.DistBackendError, match=f"{words} of ring_attention must be the same"):
                call()

    meshdist.run(main, 2)


def test_what_is_wrong_is_named() -> None:
    def main() -> None:
        world = meshdist.group.WORLD
        q = np.ones((1, 2, 3, 4))
        wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, "q must have 4 dimensions, got shape \\(3, 4\\)",
             lambda: ring_attention(q[0, 0], q, q, axis=world)),
            (ValueError, "k and v the same number of heads, and q a multiple of that, got q \\(1, 2, 3, 4\\)",
             lambda: ring_attention(q, q[:, :1], q, axis=world)),
            (ValueError, "the same head size", lambda: ring_attention(q, q[..., :2], q, axis=world)),
            (ValueError, "q, k and v must have blocks of one length",
             lambda: ring_attention(q[:, :, :2], q, q, axis=world)),
            (ValueError, "its length must be even", lambda: ring_attention(q, q, q, axis=world, zigzag=True)),
            (TypeError, "one dtype, got float64, float32, float64",
             lambda: ring_attention(q, q.astype(np.float32), q, axis=world)),
            (TypeError, "k must be an array, got a list", lambda: ring_attention(q, [q], q, axis=world)),
            (ValueError, "split into 4 equal chunks, got length 6; pad it to 8",
             lambda: sequence_positions(6, axis=world, zigzag=True)),
        ]  # fmt: skip
        for kind, words, call in wrong:
            with pytest.raises(kind, match=rf"on group 'world' \(rank {meshdist.get_rank()} of 2\): .*({words})"):
                call()
        with pytest.raises(TypeError, match="ring_attention_backward has no gradient"):
            grad(lambda x: anp.sum(grad(lambda y: anp.sum(ring_attention(y, y, y, axis=None)))(x)))(q)

    meshdist.run(main, 2)
