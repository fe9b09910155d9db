"""autograd_stage: the halves of the backward pass are those of the whole, and compute nothing twice."""

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive

import meshdist as dist
from meshdist.autograd import all_reduce, copy, value_and_grad
from meshdist.parallel import PipelineRunner, autograd_stage, one_f_one_b, zero_bubble

RNG = np.random.default_rng(5)
X, DY = RNG.standard_normal((3, 4)), RNG.standard_normal((3, 2))


def parameters(dtype="float64"):
    rng = np.random.default_rng(1)
    names = {"w": (4, 5), "b": (5,), "v": (5, 2), "gain": (2,), "unused": (2, 2)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in names.items()}


def network(p, x):
    hidden = anp.tanh(x @ p["w"] + p["b"])
    return hidden @ p["v"] * anp.exp(p["gain"]) + anp.sum(p["b"] ** 2)


def halves(stage, x, dy):
    y, saved = stage.forward(x)
    dx, rest = stage.backward_input(saved, dy)
    return y, dx, stage.backward_weight(rest)


def expected(fun, p, x, dy):
    return value_and_grad(lambda p, x: anp.sum(fun(p, x) * dy), (0, 1))(p, x)[1]


def test_halves_are_the_gradients_of_the_whole():
    p = parameters()
    y, dx, grads = halves(autograd_stage(network, p), X, DY)
    np.testing.assert_array_equal(y, network(p, X))
    of_p, of_x = expected(network, p, X, DY)
    np.testing.assert_allclose(dx, of_x, rtol=1e-13)
    assert list(grads) == list(p)
    for name, gradient in grads.items():
        np.testing.assert_allclose(gradient, of_p[name], rtol=1e-13)


def test_parameters_are_looked_up_in_each_forward():
    p = parameters()
    stage = autograd_stage(network, p)
    p["v"] = np.zeros_like(p["v"])
    p["b"] *= 0
    np.testing.assert_array_equal(stage.forward(X)[0], np.zeros((3, 2)))


def test_gradients_have_the_dtypes_of_their_arrays():
    _, dx, grads = halves(autograd_stage(network, parameters("float32")), X.astype("float32"), DY.astype("float32"))
    assert {dx.dtype, *(gradient.dtype for gradient in grads.values())} == {np.dtype("float32")}


def test_integers_have_no_gradient():
    _, dx, grads = halves(autograd_stage(lambda p, rows: p[rows], np.eye(3)), np.array([2, 0, 2]), np.ones((3, 3)))
    assert dx is None
    np.testing.assert_array_equal(grads.sum(axis=1), [3, 0, 6])


def test_trees_go_in_and_out():
    def fun(p, x):
        return {"sum": x[0] + p[0], "product": (x[1] * p[1], x[0])}

    dy = {"sum": np.full(2, 10.0), "product": (np.full(2, 3.0), np.full(2, 1.0))}
    y, dx, grads = halves(autograd_stage(fun, [np.ones(2), np.full(2, 2.0)]), (np.zeros(2), np.full(2, 5.0)), dy)
    assert y["product"][0].tolist() == [10, 10]
    assert [each.tolist() for each in dx] == [[11, 11], [6, 6]]
    assert [each.tolist() for each in grads] == [[10, 10], [15, 15]]


def test_keywords_are_not_differentiated():
    stage = autograd_stage(lambda p, x, scale: p * x * scale, np.ones(2))
    y, saved = stage.forward(np.full(2, 3.0), scale=np.array([1, 2]))
    assert y.tolist() == [3, 6]
    assert stage.backward_input(saved, np.ones(2))[0].tolist() == [1, 2]


def test_each_gradient_is_computed_once_and_in_its_half():
    calls = []

    @primitive
    def product(x, w):
        return x @ w

    def of_input(y, x, w):
        return lambda g: calls.append("x") or g @ w.T

    def of_weight(y, x, w):
        return lambda g: calls.append("w") or x.T @ g

    defvjp(product, of_input, of_weight)
    stage = autograd_stage(lambda p, x: product(anp.tanh(product(x, p[0])), p[1] * 2.0), [np.eye(4), np.ones((4, 2))])
    _, saved = stage.forward(X)
    _, rest = stage.backward_input(saved, DY)
    assert calls == ["x", "x"]
    stage.backward_weight(rest)
    assert calls == ["x", "x", "w", "w"]


def test_a_gradient_of_another_shape_is_refused():
    stage = autograd_stage(network, parameters())
    _, saved = stage.forward(X)
    with pytest.raises(ValueError, match=r"dy must be like y, float64\[3, 2\], got float64\[3, 3\]"):
        stage.backward_input(saved, np.ones((3, 3)))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="autograd_stage: fun must be callable, got dict"):
        autograd_stage({}, None)


def test_collectives_of_a_stage_are_differentiated():
    p = parameters()

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = slice(None, 2) if mesh.get_rank() == 0 else slice(2, None)

        def layer(p, x):
            hidden = anp.tanh(copy(x, mesh["tp"]) @ p["w"])
            return all_reduce(hidden @ p["v"], "sum", mesh["tp"])

        return halves(autograd_stage(layer, {"w": p["w"][:, mine], "v": p["v"][mine]}), X, DY)

    of_p, of_x = expected(lambda p, x: anp.tanh(x @ p["w"]) @ p["v"], p, X, DY)
    (_, first, of_first), (_, second, of_second) = dist.run(program, 2)
    np.testing.assert_allclose(first, of_x, rtol=1e-12)
    np.testing.assert_allclose(second, of_x, rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([of_first["w"], of_second["w"]], axis=1), of_p["w"], rtol=1e-12)


@pytest.mark.parametrize("schedule", [one_f_one_b, zero_bubble])
def test_a_pipeline_of_such_stages(schedule):
    weights = [np.diag([1.0, 2.0, 3.0, 4.0]) / 4, np.eye(4) / 2]

    def loss(y, target):
        return value_and_grad(lambda y: anp.mean((y - target) ** 2))(y)

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        stage = autograd_stage(lambda w, x: anp.tanh(x @ w), weights[mesh.get_rank()])
        return PipelineRunner([stage], schedule(2, 3), mesh["pp"], loss=loss).step(X, X).gradients

    whole = value_and_grad(lambda w: anp.mean((anp.tanh(anp.tanh(X @ w[0]) @ w[1]) - X) ** 2))(weights)[1]
    for rank, gradients in enumerate(dist.run(program, 2)):
        np.testing.assert_allclose(gradients[rank], whole[rank], rtol=1e-12)
