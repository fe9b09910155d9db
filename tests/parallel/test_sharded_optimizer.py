"""ShardedOptimizer: the same bits as the unsharded update, and the state of a block; trees of parameters; averaging."""

from __future__ import annotations

import numpy as np
import pytest

import meshdist as dist
from meshdist.parallel import (
    GradientReducer,
    HierarchicalAverager,
    PeriodicAverager,
    ShardedOptimizer,
    average_parameters,
    broadcast_parameters,
)

SHAPES = {"w": (5, 3), "b": (3,), "s": (), "e": (0, 4), "half": (7,)}


def parameters():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype("f4" if name == "half" else "f8") for name, shape in SHAPES.items()}


def gradients(step, rank):
    """Small integers, whose sums do not depend on the order."""
    rng = np.random.default_rng([step, rank])
    return {name: rng.integers(-9, 10, array.shape).astype(array.dtype) for name, array in parameters().items()}


def adam(parameters, gradients, state, lr):
    state["step"] = state.get("step", 0) + 1
    first = state.setdefault("first", np.zeros_like(parameters))
    second = state.setdefault("second", np.zeros_like(parameters))
    first += (1 - 0.9) * (gradients - first)
    second += (1 - 0.99) * (gradients * gradients - second)
    scale = np.sqrt(second / (1 - 0.99 ** state["step"])) + 1e-8
    return parameters - (lr * first / (1 - 0.9 ** state["step"]) / scale).astype(parameters.dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_same_bits_as_the_update_of_all_parameters(size):
    def program():
        rank = dist.get_rank()
        sharded, whole, states = ShardedOptimizer(parameters(), adam, lr=0.1), parameters(), {}
        reducer = GradientReducer(whole)
        for step in range(3):
            if step == 1:
                sharded.zero()
                for name, gradient in gradients(step, rank).items():
                    sharded.gradients[name] += gradient
                sharded.step(lr=0.01)
            else:
                sharded.step(gradients(step, rank))
            for name, gradient in gradients(step, rank).items():
                reducer.ready(name, gradient)
            reducer.wait()
            for name in whole:
                state = states.setdefault(name, {})
                whole[name] = adam(whole[name], reducer.gradients[name], state, 0.01 if step == 1 else 0.1)
        for name, due in whole.items():
            assert sharded.parameters[name].tobytes() == due.tobytes(), name
        found = sharded.consolidate_state_dict()
        assert found["step"] == 3
        for name in SHAPES:
            assert found["second"][name].tobytes() == states[name]["second"].tobytes()
        return sum(len(state["first"]) for state in sharded.state), found

    results = dist.run(program, size)
    assert sum(length for length, _ in results) == 15 + 3 + 1 + 7
    assert max(length for length, _ in results) <= -(-19 // size) + -(-7 // size)


def test_a_state_goes_on_with_another_number_of_ranks():
    def train(steps, size, begin=None):
        def program():
            optimizer = ShardedOptimizer(begin[0] if begin else parameters(), adam, lr=0.1)
            if begin:
                optimizer.load_state_dict(begin[1])
            for step in steps:
                optimizer.step(gradients(step, 0))  # alike on all ranks, so that their number does not show
            return {name: array.copy() for name, array in optimizer.parameters.items()}, (
                optimizer.consolidate_state_dict()
            )

        return dist.run(program, size)[-1]

    due, _ = train([0, 1], 2)
    found, _ = train([1], 3, train([0], 2))
    for name in SHAPES:
        np.testing.assert_allclose(found[name], due[name], rtol=1e-6)


def test_what_a_sharded_optimizer_refuses():
    def program():
        optimizer = ShardedOptimizer({"w": np.zeros(2), "b": np.zeros(1)}, adam, lr=1.0)
        with pytest.raises(ValueError, match="step got no gradient for 'b'; pass a gradient for each parameter"):
            optimizer.step({"w": np.zeros(2)})
        with pytest.raises(ValueError, match="step got one for 'x', which is not a parameter"):
            optimizer.step({"w": np.zeros(2), "b": np.zeros(1), "x": np.zeros(1)})
        with pytest.raises(ValueError, match=r"the gradient of 'b' must be float64\[1\], got float64\[2\]"):
            optimizer.step({"w": np.zeros(2), "b": np.zeros(2)})
        with pytest.raises(TypeError, match=r"ShardedOptimizer on .*: the gradient of 'b': gradient must be an array"):
            optimizer.step({"w": np.zeros(2), "b": [0.0]})
        with pytest.raises(ValueError, match=r"'first' of 'b' must be an array of shape \(1,\), got None"):
            optimizer.load_state_dict({"first": {"w": np.zeros(2)}})
        with pytest.raises(TypeError, match="update must be callable, got float"):
            ShardedOptimizer({"w": np.zeros(2)}, 0.1)
        with pytest.raises(
            dist.DistBackendError, match="the ranks' parameters differ, first number 0 where rank 0 has 'w'"
        ):
            ShardedOptimizer({"w": np.zeros(2 + dist.get_rank())}, adam)

    dist.run(program, 2)


def test_broadcast_parameters_of_trees_in_place():
    def program():
        rank = dist.get_rank()
        inner = np.full((2, 2), rank, "f4")
        strided = np.zeros((2, 4))[:, ::2]
        strided[...] = rank
        tree = {"layers": [{"w": inner, "b": np.array(float(rank))}, (np.full(3, rank), None)], "strided": strided}
        assert broadcast_parameters(tree, src=1) is tree
        assert tree["layers"][0]["w"] is inner
        return inner.tolist(), float(tree["layers"][0]["b"]), tree["layers"][1][0].tolist(), strided.tolist()

    assert dist.run(program, 3) == 3 * [([[1.0, 1.0], [1.0, 1.0]], 1.0, [1, 1, 1], [[1.0, 1.0], [1.0, 1.0]])]


def test_average_parameters_in_place():
    def program():
        tree = [np.full(2, 1.0 * dist.get_rank()), {"x": np.full((1, 2), 2j * dist.get_rank())}]
        average_parameters(tree)
        return tree[0].tolist(), tree[1]["x"].tolist()

    assert dist.run(program, 3) == 3 * [([1.0, 1.0], [[2j, 2j]])]


@pytest.mark.parametrize("function", [broadcast_parameters, average_parameters])
@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"lr": 0.1}, r"tree\['lr'\] is a number, which cannot be written in place"),
        ([np.broadcast_to(0.0, 3)], r"tree\[0\] is read-only, and this call writes to it"),
        ("weights", "tree must be an array, got str"),
    ],
)
def test_trees_that_cannot_be_written_are_refused(function, tree, told):
    def program():
        with pytest.raises((TypeError, ValueError), match=told):
            function(tree)

    dist.run(program, 2)


@pytest.mark.parametrize("function", [broadcast_parameters, average_parameters])
def test_trees_that_differ_between_ranks_are_refused_on_all(function):
    def program():
        with pytest.raises(dist.DistBackendError, match="disagree|differ"):
            function({"a": np.zeros(2), "b" if dist.get_rank() else "c": np.zeros(2)})

    dist.run(program, 2)


def steps_at_which(averager, num_steps):
    """Return the steps after which the value of this rank is not its own any more, and what it is then."""
    found = {}
    for step in range(num_steps):
        array = np.array([float(dist.get_rank())])
        averager.average_parameters({"w": array})
        if array[0] != dist.get_rank():
            found[step] = float(array[0])
    assert averager.step == num_steps
    return found


def test_periodic_averaging():
    def program():
        return steps_at_which(PeriodicAverager(period=3, warmup_steps=2), 9)

    assert dist.run(program, 2) == 2 * [{2: 0.5, 5: 0.5, 8: 0.5}]


def test_hierarchical_averaging():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
        return steps_at_which(HierarchicalAverager({4: mesh, 2: mesh["ranks"]}, warmup_steps=1), 9)

    low = {2: 0.5, 4: 1.5, 6: 0.5, 8: 1.5}
    high = {2: 2.5, 4: 1.5, 6: 2.5, 8: 1.5}
    assert dist.run(program, 4) == [low, low, high, high]


def test_wrong_arguments_of_averagers():
    def program():
        with pytest.raises(ValueError, match="period must be at least 1, got 0"):
            PeriodicAverager(0)
        with pytest.raises(TypeError, match="period must be an integer, got 1.5"):
            PeriodicAverager(1.5)
        with pytest.raises(ValueError, match="warmup_steps must be at least 0, got -1"):
            PeriodicAverager(1, -1)
        with pytest.raises(ValueError, match=r"groups must have positive periods as keys, got \[0\]"):
            HierarchicalAverager({0: None})
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
        with pytest.raises(ValueError, match="must contain the ranks of that with a shorter period"):
            HierarchicalAverager({1: mesh["hosts"], 2: mesh["ranks"]})

    dist.run(program, 4)
