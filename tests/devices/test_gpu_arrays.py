"""Arrays over a mesh with blocks on one real GPU, the ranks as threads that share it."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from array_programs import check_stencils, on_gpu_mesh

import meshdist as dist

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.fixture
def random_programs(gpus, monkeypatch):
    gpus(1)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tensor"))
    import random_programs

    return random_programs


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_random_programs_are_those_of_numpy(random_programs, num_ranks):
    refusals = Counter()
    failures = dist.run(random_programs.run_programs, num_ranks, (range(60), "cuda", refusals), timeout=60)[0]
    print(*(f"{times} times: {refusal}" for refusal, times in refusals.most_common()), sep="\n", file=sys.stderr)
    assert failures == {}


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_stencils_and_layouts_are_those_on_the_cpu(gpus, shape):
    gpus(1)
    check_stencils(shape)


def test_gradients_of_a_network_are_those_of_numpy(gpus):
    gpus(1)
    pytest.importorskip("autograd")
    from meshdist.autograd import value_and_grad
    from meshdist.tensor import Shard, distribute_tensor

    rng = np.random.default_rng(0)
    x, w1, w2 = rng.standard_normal((8, 6)), rng.standard_normal((6, 4)), rng.standard_normal((4, 2))

    def loss(weights, x):
        hidden = np.tanh(x @ weights["w1"])
        return ((hidden @ weights["w2"]) ** 2).mean()

    def main(mesh):
        data = distribute_tensor(x, mesh, {"dp": Shard(0)}, src_data_rank=None)
        weights = {
            "w1": distribute_tensor(w1, mesh, {"tp": Shard(1)}, src_data_rank=None),
            "w2": distribute_tensor(w2, mesh, {"tp": Shard(0)}, src_data_rank=None),
        }
        value, grads = value_and_grad(loss)(weights, data)
        return float(value), {name: grads[name].full().get() for name in grads}

    want, want_grads = value_and_grad(loss)({"w1": w1, "w2": w2}, x)
    for value, grads in on_gpu_mesh((2, 2), ("dp", "tp"), main):
        assert value == pytest.approx(float(want), rel=1e-12)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, want_grads[name], rtol=1e-10)


@pytest.fixture
def gradient_programs(gpus):
    gpus(1)
    pytest.importorskip("autograd")
    import gradient_programs

    return gradient_programs


def test_gradients_of_functions_are_those_of_numpy(gradient_programs):
    import cupy

    from meshdist.autograd import value_and_grad

    for name, function in gradient_programs.FUNCTIONS.items():
        want, want_grad = value_and_grad(function)(*gradient_programs.arguments())
        value, gradient = value_and_grad(function)(*map(cupy.asarray, gradient_programs.arguments()))
        assert type(gradient) is cupy.ndarray
        assert float(value) == pytest.approx(float(want), rel=1e-10), name
        np.testing.assert_allclose(gradient.get(), want_grad, rtol=1e-8, atol=1e-10, err_msg=name)


def test_gradients_through_collectives_are_those_of_numpy(gradient_programs):
    import cupy

    def on(device, **overrides):
        def main():
            mesh = dist.init_device_mesh(device, (2,), mesh_dim_names=("tp",), backend_override=overrides or None)
            return gradient_programs.gradients_through_collectives(mesh, cupy if device == "cuda" else np)

        return dist.run(main, 2, timeout=60)

    for found, want in zip(on("cuda", tp="cpu:threads,cuda:threads"), on("cpu"), strict=True):
        for name, arrays in want.items():
            for here, there in zip(found[name], arrays, strict=True):
                np.testing.assert_allclose(here, there, rtol=1e-8, atol=1e-10, err_msg=name)


def test_blocks_go_to_the_gpu_and_back(gpus):
    gpus(1)
    import cupy

    from meshdist.tensor import Shard, distribute_tensor

    def main():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = distribute_tensor(np.arange(6.0), mesh, {"dp": Shard(0)}, src_data_rank=None)
        y = x.cuda()
        assert isinstance(y.to_local(), cupy.ndarray)
        return (y * 2).cpu().full().tolist()

    assert dist.run(main, 2, timeout=60) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2


@pytest.mark.parametrize("format", ["safetensors", "npy"])
def test_checkpoints_of_gpu_arrays(gpus, tmp_path, format):
    gpus(1)
    import cupy

    from meshdist import checkpoint
    from meshdist.tensor import Shard, distribute_tensor

    def main(mesh):
        x = distribute_tensor(np.arange(10.0), mesh, {"dp": Shard(0)}, src_data_rank=None)
        tree = {"x": x, "plain": cupy.arange(3), "step": 4}
        checkpoint.save(str(tmp_path), tree, step=1, format=format)
        again = checkpoint.load(str(tmp_path), like=tree)
        assert isinstance(again["x"].to_local(), cupy.ndarray)
        return again["x"].full().tolist(), again["plain"].tolist(), again["step"]

    assert on_gpu_mesh((2,), ("dp",), main) == [(list(range(10)), [0, 1, 2], 4)] * 2


def test_gradients_are_reduced_in_buckets(gpus):
    gpus(1)
    import cupy

    from meshdist.parallel import GradientReducer

    def main(mesh):
        reducer = GradientReducer({"w": cupy.zeros((300, 5)), "b": cupy.zeros(5)}, mesh["dp"], 1000, 1000)
        for name, shape in (("b", (5,)), ("w", (300, 5))):
            reducer.ready(name, cupy.full(shape, 2.0 * mesh.get_rank()))
        reducer.wait()
        return [float(reducer.gradients[name].get().mean()) for name in ("w", "b")]

    assert on_gpu_mesh((2,), ("dp",), main) == [[1.0, 1.0]] * 2
