"""Programs with DTensors under grad: trees, dtypes, what is sent, what is refused; and random programs."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tensor"))
from placed_arrays import cases, mesh_2x2, on_meshes, place, placed

import meshdist
import meshdist.autograd as ag
from meshdist.tensor import DTensor, PlacementError, Shard, distribute_tensor, halo, implicit_redistribution, local_map


class Layer(NamedTuple):
    w: Any
    b: Any


def network(params: Any, x: Any, labels: Any, computed: Callable[[Any], Any] = lambda logits: logits) -> Any:
    """Return the loss of a network of two layers, by NumPy's functions alone."""
    hidden = np.tanh(x @ params["layers"][0].w + params["layers"][0].b)
    logits = computed(hidden @ params["layers"][1].w + params["layers"][1].b)
    shifted = logits - np.max(logits, axis=1, keepdims=True)
    logs = shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
    return -np.mean(np.sum(logs * labels, axis=1)) * params["scale"]


def test_a_network_of_two_layers_has_the_gradients_of_one_process_and_sends_as_few_messages_as_by_hand() -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.random((6, 8)), np.eye(3)[[0, 1, 2, 2, 1, 0]]
    w1, w2, b1, b2 = rng.random((8, 4)), rng.random((4, 3)), rng.random(4), rng.random(3)

    def program() -> None:
        mesh = mesh_2x2()
        params = {
            "layers": [
                Layer(place(w1, mesh, {"tp": Shard(1)}), place(b1, mesh, {"tp": Shard(0)})),
                Layer(place(w2, mesh, {"tp": Shard(0)}), b2),
            ],
            "scale": 2.0,
        }
        rows = [place(whole, mesh, {"dp": Shard(0)}) for whole in (x, labels)]
        differentiated = ag.value_and_grad(lambda *args: network(*args, lambda y: y.redistribute({"dp": Shard(0)})))
        value, gradient = differentiated(params, *rows)
        with mesh.account() as account:
            assert float(differentiated(params, *rows)[0]) == float(value)
        # Along tp: the sum of the second layer, and nothing in the backward pass, since x is not differentiated. Along
        # dp: the value, once more as the gradient of its factor, and all gradients in one bucket.
        calls = {axis: sum(volume.calls for volume in by.values()) for axis, by in account.volumes().items()}
        assert calls == {"dp": 3, "tp": 1}, calls

        whole = {"layers": [Layer(w1, b1), Layer(w2, b2)], "scale": 2.0}
        flat = lambda w1, b1, w2, b2, scale: network_of(anp, w1, b1, w2, b2, scale, x, labels)  # noqa: E731
        wanted = autograd.grad(flat, (0, 1, 2, 3, 4))(w1, b1, w2, b2, 2.0)
        layers = gradient["layers"]
        found = (*layers[0], *layers[1], gradient["scale"])
        for got, right in zip(found, wanted, strict=True):
            assert np.allclose(got.full() if isinstance(got, DTensor) else got, right)
        assert isinstance(layers[0], Layer)
        assert layers[0].w.placements == params["layers"][0].w.placements
        assert isinstance(layers[1].b, np.ndarray)
        assert isinstance(gradient["scale"], np.float64)
        assert network(whole, x, labels) == pytest.approx(float(value))

    meshdist.run(program, 4)


def network_of(np: Any, w1: Any, b1: Any, w2: Any, b2: Any, scale: Any, x: Any, labels: Any) -> Any:
    logits = np.tanh(x @ w1 + b1) @ w2 + b2
    logs = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    return -np.mean(np.sum(logs * labels, axis=1)) * scale


def test_gradients_have_the_dtype_and_own_their_memory() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        x = np.arange(12.0).reshape(4, 3)
        for dtype in (np.float32, np.float64, np.complex128):
            w = place(x.astype(dtype), mesh, {"dp": Shard(0)})
            same = place(x.astype(dtype), mesh, {})
            first, second = ag.grad(lambda w, v: np.sum(np.real(w + v)), (0, 1))(w, same)
            for gradient, of in ((first, w), (second, same)):
                assert (gradient.dtype, gradient.layout) == (np.dtype(dtype), of.layout)
                gradient *= 2
            assert np.all(first.full() == 2)
            assert np.all(second.full() == 2)
        half = place(x.astype(np.float32), mesh, {"tp": Shard(1)})
        assert ag.grad(lambda w: np.mean((x @ w.T) ** 2))(half).dtype == np.float32
        pending = place(x, mesh, {"tp": meshdist.tensor.Partial()})
        assert np.allclose(ag.grad(lambda w: np.sum(w**3))(pending).full(), 3 * x**2)
        assert not ag.grad(lambda w: 1.0 * np.sum(x))(pending).full().any()

    meshdist.run(program, 4)


def test_second_derivatives() -> None:
    def loss(np: Any, w: Any, x: Any) -> Any:
        return np.sum(np.tanh(x @ w) ** 3) + np.sum(np.max(w, axis=0) * w[1])

    def program(mesh: Any, rng: Any) -> None:
        x, w = rng.standard_normal((4, 3)), rng.standard_normal((3, 2))
        wanted = autograd.grad(lambda w: anp.sum(autograd.grad(lambda w: loss(anp, w, x))(w) ** 2))(w)
        tensors = [place(x, mesh, {"a": Shard(0)}), place(w, mesh, {"a": Shard(1)})]
        with implicit_redistribution():
            found = ag.grad(lambda w: np.sum(ag.grad(lambda w: loss(np, w, tensors[0]))(w) ** 2))(tensors[1])
        assert np.allclose(found.full(), wanted)

    on_meshes(program, meshes=((1,), (2,), (3,)))


def test_full_buckets_are_started_during_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdist.autograd.pending_gradients.BUCKET_BYTES", 64)

    def program() -> None:
        mesh = mesh_2x2()
        rng = np.random.default_rng(0)
        x, weights = rng.random((6, 4)), [rng.random((4, 4)) for _ in range(6)]
        rows = place(x, mesh, {"dp": Shard(0), "tp": Shard(1)})

        def loss(np: Any, weights: Any, x: Any) -> Any:
            for w in weights:
                x = np.tanh(x @ w)
            return np.sum(x)

        placed_weights = [place(w, mesh, {}) for w in weights]
        with mesh.account() as account:
            found = ag.grad(lambda weights: loss(np, weights, rows))(placed_weights)
        wanted = autograd.grad(lambda weights: loss(anp, weights, x))(weights)
        assert all(np.allclose(got.full(), right) for got, right in zip(found, wanted, strict=True))
        assert account.volumes()["dp"]["all_reduce"].calls >= len(weights)

    meshdist.run(program, 4)


def test_gradients_of_cut_weights_are_scattered_together() -> None:
    """Weights that are gathered for their use, as by FSDP, beside one that is not."""

    def program(mesh: Any, rng: Any) -> None:
        x, weights = rng.random((6, 5)), [rng.random((5, 5)) for _ in range(3)]
        rows = place(x, mesh, {"a": Shard(0)})
        cuts = ({"a": Shard(0)}, {"a": Shard(1)}, {})
        cut = [place(w, mesh, placements) for w, placements in zip(weights, cuts, strict=True)]

        def loss(np: Any, weights: Any, x: Any) -> Any:
            for w in weights:
                x = np.tanh(x @ (w.redistribute({}) if hasattr(w, "redistribute") else w))
            return np.sum(x)

        differentiated = ag.grad(lambda weights: loss(np, weights, rows))
        differentiated(cut)
        with mesh.account() as account:
            found = differentiated(cut)
        wanted = autograd.grad(lambda weights: loss(anp, weights, x))(weights)
        for got, right, w in zip(found, wanted, cut, strict=True):
            assert np.allclose(got.full(), right)
            assert got.layout is w.layout
        if mesh.size() > 1 and mesh.ndim == 1:
            # An all_gather for each weight that is cut; the loss; the gradients of these two; and that of the third.
            calls = {name: volume.calls for name, volume in account.volumes()["a"].items()}
            assert sum(calls.values()) == 2 + 1 + 1 + 1, calls
            assert calls["reduce_scatter_tensor"] == 1, calls

    on_meshes(program)


# ---- Random programs


STEPS: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda np, x, y: x + y, lambda np, x, y: x * y, lambda np, x, y: np.tanh(x) - y, lambda np, x, y: x @ y.T @ x / 9,
    lambda np, x, y: np.exp(-(x**2)) * y, lambda np, x, y: np.where(x > y, x, 2 * y), lambda np, x, y: x - np.mean(y),
    lambda np, x, y: x / np.sqrt(np.sum(y**2, axis=1, keepdims=True) + 1), lambda np, x, y: np.maximum(x, y),
    lambda np, x, y: np.concatenate([x[:, 2:], y[:, :2]], axis=1), lambda np, x, y: x + np.sum(y, axis=0),
    lambda np, x, y: x * np.max(y, axis=1, keepdims=True), lambda np, x, y: np.einsum("ij,kj->ki", x, y) @ x / 9,
    lambda np, x, y: x[np.array([0, 2, 2, 1])] + y, lambda np, x, y: np.cumsum(x, axis=1) * y,
)  # fmt: skip


def random_program(mesh: Any, rng: Any, cases: int) -> None:
    for _ in range(cases):
        steps = [(int(rng.integers(len(STEPS))), *map(int, rng.integers(0, 3 + number, 2))) for number in range(5)]
        arrays = [rng.standard_normal((4, 5)) for _ in range(3)]
        tensors = [placed(rng, x, mesh, partial=False) for x in arrays]

        def loss(np: Any, *given: Any, steps: Any = steps) -> Any:
            values = list(given)
            for step, first, second in steps:
                values.append(STEPS[step](np, values[first], values[second]))
            return sum(np.sum(np.tanh(value)) for value in values)

        wanted = autograd.grad(lambda *xs, loss=loss: loss(anp, *xs), (0, 1, 2))(*arrays)
        with implicit_redistribution():
            found = ag.grad(lambda *xs, loss=loss: loss(np, *xs), (0, 1, 2))(*tensors)
        for got, right, tensor in zip(found, wanted, tensors, strict=True):
            assert np.allclose(got.full(), right), (steps, mesh.shape, [x.placements for x in tensors])
            assert got.layout is tensor.layout


@cases(2, 12)
def test_random_programs_have_the_gradients_of_one_process(cases: int) -> None:
    on_meshes(random_program, cases, seed=5)


# ---- What is refused


def refused(function: Callable[[], Any], kind: type[BaseException]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def test_what_has_no_gradient_is_named() -> None:
    def program() -> list[str]:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = distribute_tensor(np.arange(6.0).reshape(3, 2), mesh, {"dp": Shard(0)})
        columns = distribute_tensor(np.ones((3, 2)), mesh, {"dp": Shard(1)})
        integers = distribute_tensor(np.arange(3), mesh, {})
        wrong = ag.local_map(lambda x: 2 * x, {"dp": Shard(0)}, vjp=lambda g, y, x: g[:0])
        unwrapped = ag.local_map(np.unwrap, {"dp": Shard(0)})  # not autograd's: a function of objects
        return [
            refused(lambda: ag.grad(lambda x: np.sum(np.cumprod(x, axis=1)))(x), TypeError),
            refused(lambda: ag.grad(lambda x: np.median(x, axis=1)[0])(x), TypeError),
            refused(lambda: ag.grad(lambda x: np.polyfit(x, x, 1))(x), TypeError),
            refused(lambda: ag.grad(lambda x: np.sum(np.dstack([x, x])))(x), TypeError),
            refused(lambda: ag.grad(lambda x: np.sum(local_map(abs, x.placements)(x)))(x), TypeError),
            refused(lambda: ag.grad(lambda x: anp.sum(halo(x, 1)))(x), TypeError),
            refused(lambda: ag.grad(lambda x: x.full(root=0))(x), TypeError),
            refused(lambda: ag.grad(lambda x: np.sum(x, axis=0))(x), ValueError),
            refused(lambda: ag.grad(lambda p: np.sum(x))({"n": integers}), TypeError),
            refused(lambda: ag.grad(lambda x: np.sum(x + columns))(x), PlacementError),
            refused(lambda: ag.grad(lambda x: np.sum(wrong(x)))(x), ValueError),
            refused(lambda: ag.grad(lambda x: np.sum(unwrapped(x)))(x), TypeError),
            refused(lambda: ag.all_reduce(x), TypeError),
        ]

    parts = (
        "cumprod has no gradient", "median has no gradient", "np.polyfit does not take", "dstack has no gradient",
        "meshdist.tensor.local_map has", "meshdist.tensor.halo has no gradient", "with root= it has no gradient",
        "shape (2,); add", "p['n'] has dtype int64", "redistribute", "vjp: the gradient of argument 0",
        "fn returned an array of objects", "x is a DTensor",
    )  # fmt: skip
    for said in meshdist.run(program, 2):
        for text, part in zip(said, parts, strict=True):
            assert part in text, (part, text)


def test_without_the_package_autograd_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['autograd'] = None; import meshdist.autograd"
    failed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "pip install autograd" in failed.stderr


def test_ranks_with_different_trees_are_named_on_all_ranks() -> None:
    def program() -> str:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        name = "w" if mesh.get_rank() == 0 else "v"
        params = {name: distribute_tensor(np.ones(3), mesh, {})}
        return refused(lambda: ag.grad(lambda p: np.sum(p[name]))(params), meshdist.DistBackendError)

    for said in meshdist.run(program, 2):
        assert "p['w']" in said
        assert "p['v']" in said


@pytest.fixture
def detail() -> Iterator[None]:
    logger = logging.getLogger("meshdist")
    level, handlers = logger.level, list(logger.handlers)
    meshdist.set_debug_level(meshdist.DebugLevel.DETAIL)
    logger.disabled = True
    yield
    logger.disabled = False
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.mark.usefixtures("detail")
def test_detail_finds_a_gradient_that_differs_where_the_array_replicates() -> None:
    def program() -> str:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        params = {"w": distribute_tensor(np.ones(3), mesh, {})}
        own = 1.0 + mesh.get_rank()
        ag.grad(lambda p: own * anp.sum(p["w"].full(grad="reduce")))(params)
        return refused(lambda: ag.grad(lambda p: own * anp.sum(p["w"].full()))(params), meshdist.DistBackendError)

    for said in meshdist.run(program, 2):
        assert "the gradient of p['w']" in said
        assert "a sum over them is missing" in said
