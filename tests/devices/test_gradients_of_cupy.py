"""Gradients by arrays of the stand-in for CuPy: those of NumPy's arrays."""

import numpy as np
import pytest

import meshdist as dist

programs = pytest.importorskip("gradient_programs", reason="autograd is not installed", exc_type=ImportError)
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("name", programs.FUNCTIONS)
def test_gradients_are_those_of_numpy(cupy, name):
    from meshdist.autograd import value_and_grad

    differentiated = value_and_grad(programs.FUNCTIONS[name])
    want, want_grad = differentiated(*programs.arguments())
    value, gradient = differentiated(*map(cupy.asarray, programs.arguments()))
    assert type(gradient) is cupy.ndarray
    assert float(value) == pytest.approx(float(want), rel=1e-12)
    np.testing.assert_allclose(gradient.get(), want_grad, rtol=1e-10, atol=1e-12)


def test_gradients_through_collectives_and_layers_are_those_of_numpy(cupy):
    def on(device, **overrides):
        def main():
            mesh = dist.init_device_mesh(device, (2,), mesh_dim_names=("tp",), backend_override=overrides or None)
            return programs.gradients_through_collectives(mesh, cupy if device == "cuda" else np)

        return dist.run(main, 2, timeout=40)

    for found, want in zip(on("cuda", tp="cpu:threads,cuda:threads"), on("cpu"), strict=True):
        for name, arrays in want.items():
            for here, there in zip(found[name], arrays, strict=True):
                np.testing.assert_allclose(here, there, rtol=1e-10, atol=1e-12, err_msg=name)


def test_gradients_of_rows_of_arrays_over_a_mesh(cupy):
    import autograd.numpy as anp

    from meshdist.autograd import grad
    from meshdist.tensor import Shard, distribute_tensor

    whole, rows = np.arange(12.0).reshape(6, 2), np.array([4, 0, 4])

    def main():
        mesh = dist.init_device_mesh("cuda", (2,), backend_override={0: "cuda:threads"})
        x = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
        return grad(lambda x: anp.sum(x[rows] ** 2))(x).full().get()

    want = grad(lambda x: anp.sum(x[rows] ** 2))(whole)
    for found in dist.run(main, 2, timeout=20):
        np.testing.assert_allclose(found, want)


def test_gradients_in_the_dtypes_that_cupy_does_not_add(cupy):
    import autograd.numpy as anp

    from meshdist.autograd import grad

    rows = np.array([1, 1, 0])
    for dtype in ("complex64", "float16"):
        x = np.ones(3, dtype)
        found = grad(lambda x: anp.sum(anp.real(x[rows] * x[rows])))(cupy.asarray(x))
        assert found.dtype == dtype
        assert found.tolist() == [2, 4, 0]
