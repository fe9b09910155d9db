"""Communication hooks: what each loses, error feedback, rounds in one order, and hooks of the user."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest

import meshdist as dist
from meshdist.parallel import GradientReducer, communication_hooks
from meshdist.parallel.communication_hooks import (
    batched_power_sgd,
    bf16_compress,
    fp16_compress,
    fp16_compress_wrapper,
    post_local_sgd,
    power_sgd,
    quantization_perchannel,
    quantization_pertensor,
)

SHAPES = {"w": (20, 30), "b": (30,), "v": (30, 8)}


def steps(reducer, num_steps=1, dtype="f4"):
    """Return, for each step, this rank's averages and the right ones, flat."""
    found = []
    for step in range(num_steps):
        gradients = [
            {
                name: np.random.default_rng([step, rank, len(shape)]).standard_normal(shape).astype(dtype)
                for name, shape in SHAPES.items()
            }
            for rank in range(dist.get_world_size())
        ]
        for name in SHAPES:
            reducer.ready(name, gradients[dist.get_rank()][name])
        reducer.wait()
        due = {name: np.mean([each[name] for each in gradients], axis=0) for name in SHAPES}
        found.append(
            tuple(np.concatenate([some[name].ravel() for name in SHAPES]) for some in (reducer.gradients, due))
        )
    return found


def reducer_with(hook, **options):
    return GradientReducer({name: np.zeros(shape, "f4") for name, shape in SHAPES.items()}, hook=hook, **options)


@pytest.mark.parametrize("buckets", [{}, {"bucket_bytes": 0, "first_bucket_bytes": 0}], ids=["one bucket", "three"])
@pytest.mark.parametrize(
    ("hook", "error"),
    [
        (communication_hooks.all_reduce, 1e-6),
        (fp16_compress, 2e-3),
        (bf16_compress, 2e-2),
        (quantization_pertensor, 0.02),
        (quantization_perchannel, 0.02),
        (partial(quantization_perchannel, bucket_size=7), 0.02),
        (fp16_compress_wrapper(communication_hooks.all_reduce), 2e-3),
        (lambda bucket: power_sgd(rank=20, start_iteration=0, min_compression_rate=0)(bucket), 1e-4),
        (lambda bucket: fp16_compress_wrapper(power_sgd(20, 0, 0))(bucket), 3e-2),
    ],
)
def test_the_error_of_a_hook_is_small_and_the_same_on_all_ranks(hook, error, buckets):
    def program():
        ((found, due),) = steps(reducer_with(hook, **buckets))
        assert np.abs(found - due).max() <= error
        return found.tobytes()

    assert len(set(dist.run(program, 3))) == 1


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)

    def program():
        ((found, due),) = steps(reducer_with(bf16_compress))
        np.testing.assert_allclose(found, due, rtol=2e-2, atol=2e-2)
        reducer = GradientReducer({"x": np.zeros(5, "f4")}, hook=bf16_compress)
        reducer.ready("x", np.array([1.0, -np.inf, np.nan, 3e38, 1 + 2**-9], "f4"))
        reducer.wait()
        one, low, nothing, high, tie = reducer.gradients["x"].tolist()
        assert (one, low, tie) == (1.0, -np.inf, 1.0)
        assert np.isnan(nothing)
        assert 2.9e38 < high < 3.1e38
        wide = GradientReducer({"x": np.zeros(5)}, hook=bf16_compress)
        with pytest.raises(TypeError, match="gradients of float64 need ml_dtypes"):
            wide.ready("x")
        return found.tobytes()

    assert len(set(dist.run(program, 3))) == 1


def test_power_sgd_makes_up_for_its_error_over_the_steps():
    def program():
        due = np.random.default_rng(dist.get_rank()).standard_normal((16, 16)).astype("f4")
        errors = {}
        for feeds_back in (True, False):
            hook = power_sgd(rank=2, start_iteration=0, use_error_feedback=feeds_back)
            reducer = GradientReducer({"w": np.zeros((16, 16), "f4")}, hook=hook)
            total = np.zeros((16, 16), "f4")
            for _ in range(100):
                reducer.ready("w", due)
                reducer.wait()
                total += reducer.gradients["w"]
            mean = sum(np.random.default_rng(rank).standard_normal((16, 16)) for rank in range(2)) / 2
            errors[feeds_back] = np.abs(total / 100 - mean).max()
        rate, before, after = hook.compression_stats()
        assert (rate, before, after) == (4.0, 25600, 6400)
        return errors

    for errors in dist.run(program, 2):
        assert errors[True] < 0.2 < 0.5 < errors[False]


def test_power_sgd_begins_after_its_first_steps_and_leaves_zeros_zero():
    def program():
        hook = power_sgd(start_iteration=2)
        for step, (found, due) in enumerate(steps(reducer_with(hook), 4)):
            assert (np.abs(found - due).max() < 1e-6) == (step < 2)
        assert hook.steps == 4
        for make in (power_sgd, batched_power_sgd):
            reducer = reducer_with(make(start_iteration=0))
            for _ in range(2):
                for name in SHAPES:
                    reducer.ready(name, np.zeros(SHAPES[name], "f4"))
                reducer.wait()
                assert all(not gradient.any() for gradient in reducer.gradients.values())

    dist.run(program, 2)


@pytest.mark.parametrize("make", [power_sgd, batched_power_sgd])
def test_wrong_arguments_of_power_sgd(make):
    with pytest.raises(ValueError, match="power_sgd: rank must be at least 1, got 0"):
        make(rank=0)
    with pytest.raises(TypeError, match="rank must be an integer, got 1.5"):
        make(rank=1.5)
    with pytest.raises(ValueError, match="start_iteration must be at least 0, got -1"):
        make(start_iteration=-1)

    def not_called():
        reducer = GradientReducer({"a": np.zeros(2)}, hook=make)
        with pytest.raises(TypeError, match=r"power_sgd creates a hook; write hook=(batched_)?power_sgd\(\)"):
            reducer.average({"a": np.zeros(2)})

    dist.run(not_called, 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [power_sgd, batched_power_sgd])
def test_a_nan_stays_in_its_step_of_power_sgd(make):
    def program():
        reducer = GradientReducer({"w": np.zeros((6, 6)), "b": np.zeros(2)}, hook=make(start_iteration=0))
        found = []
        for bad in (("w", np.nan), ("b", np.nan), ("w", np.inf)):
            gradients = {"w": np.ones((6, 6)), "b": np.ones(2)}
            reducer.average(gradients)
            if dist.get_rank() == 1:
                gradients[bad[0]].flat[0] = bad[1]
            reducer.average(gradients)
            found.append(bool(np.isfinite(reducer.gradients[bad[0]]).all()))
            for _ in range(20):
                reducer.average({"w": np.ones((6, 6)), "b": np.ones(2)})
            np.testing.assert_allclose(reducer.gradients["w"], 1, atol=0.2)
            np.testing.assert_allclose(reducer.gradients["b"], 1, atol=0.2)
        return found

    assert dist.run(program, 2) == 2 * [[False, False, False]]


def test_power_sgd_of_two_reducers_is_refused():
    def program():
        hook = power_sgd(start_iteration=0)
        small, large = (GradientReducer({"w": np.zeros((size, size))}, hook=hook) for size in (6, 7))
        small.average({"w": np.ones((6, 6))})
        with pytest.raises(ValueError, match=r"the errors of 36 gradients for bucket 0, which has 49; make a hook for"):
            large.average({"w": np.ones((7, 7))})

    dist.run(program, 2)


@pytest.mark.parametrize(
    "hook",
    [
        fp16_compress,
        bf16_compress,
        quantization_pertensor,
        quantization_perchannel,
        power_sgd(),
        batched_power_sgd(),
        fp16_compress_wrapper(communication_hooks.all_reduce),
        lambda bucket: bucket.buffer() * 1j,
    ],
)
def test_no_hook_drops_imaginary_parts(hook):
    dtype = float if hook.__name__ == "<lambda>" else complex

    def program():
        reducer = GradientReducer({"w": np.zeros((4, 4), dtype)}, hook=hook)
        with pytest.raises(TypeError, match="gradients of complex128 cannot be compressed|float64 has no imaginary"):
            reducer.average({"w": np.ones((4, 4), dtype)})

    dist.run(program, 2)


@pytest.mark.parametrize("hook", [quantization_pertensor, quantization_perchannel])
def test_a_nan_stays_in_its_channel_of_quantization(hook):
    def program():
        reducer = GradientReducer({"w": np.zeros(1000, "f4")}, hook=hook)
        gradient = np.ones(1000, "f4")
        gradient[dist.get_rank()] = np.nan if dist.get_rank() else np.inf
        with np.errstate(all="raise"):
            reducer.average({"w": gradient})
        return int(np.isnan(reducer.gradients["w"]).sum())

    assert dist.run(program, 2) == 2 * [1000 if hook is quantization_pertensor else 512]


def in_place(bucket):
    bucket.buffer()[...] = 7


def returns_an_array(bucket):
    return np.full(bucket.buffer().size, 7.0)


def returns_a_future(bucket):
    work = dist.all_reduce(bucket.buffer() * 0 + 7, "max", bucket.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def of_two_rounds(bucket):
    sums = np.ones(bucket.buffer().size)
    yield dist.all_reduce(sums, group=bucket.group, async_op=True)
    yield dist.all_reduce(sums, group=bucket.group, async_op=True)
    return sums + 3


def of_another_dtype(bucket):
    half = bucket.over(np.full(bucket.buffer().size, 7, np.float16))
    assert half.names() == bucket.names()
    assert half.gradients()[0].dtype == np.float16
    return dist.all_reduce(half.buffer(), "avg", half.group, async_op=True)


@pytest.mark.parametrize("hook", [in_place, returns_an_array, returns_a_future, of_two_rounds, of_another_dtype])
def test_hooks_of_the_user(hook):
    def program():
        reducer = GradientReducer({"a": np.zeros(3), "b": np.zeros(2)}, hook=hook, bucket_bytes=0, first_bucket_bytes=0)
        for name in ("b", "a"):
            reducer.ready(name)
        reducer.wait()
        assert reducer.statistics().hook == hook.__name__
        return [gradient.tolist() for gradient in reducer.gradients.values()]

    assert dist.run(program, 2) == 2 * [[[7.0, 7.0, 7.0], [7.0, 7.0]]]


def test_a_hook_that_returns_something_else_is_refused():
    def program():
        reducer = GradientReducer({"a": np.zeros(3)}, hook=lambda bucket: np.zeros(2))
        reducer.ready("a")
        with pytest.raises(
            ValueError, match=r"hook <lambda> must return the 3 elements of bucket 0, or a Work or Future"
        ):
            reducer.wait()

    dist.run(program, 2)


@pytest.mark.parametrize("reduces_later", [True, False])
def test_post_local_sgd_averages_within_the_subgroup_later(reduces_later):
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
        hook = post_local_sgd(mesh["ranks"], 2, post_local_gradient_allreduce=reduces_later)
        reducer = GradientReducer({"a": np.zeros(1), "b": np.zeros(1)}, hook=hook, bucket_bytes=0, first_bucket_bytes=0)
        found = []
        for _ in range(3):
            for name in ("a", "b"):
                reducer.ready(name, np.array([float(dist.get_rank())]))
            reducer.wait()
            found.append(float(reducer.gradients["a"][0] + reducer.gradients["b"][0]) / 2)
        return found

    later = [0.5, 0.5, 2.5, 2.5] if reduces_later else [0.0, 1.0, 2.0, 3.0]
    assert dist.run(program, 4) == [[1.5, 1.5, last] for last in later]
    with pytest.raises(ValueError, match="start_iteration must be at least 0, got -1"):
        post_local_sgd(None, -1)


@pytest.mark.parametrize("reduces_later", [True, False])
def test_faults_are_told_where_post_local_sgd_communicates(reduces_later):
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
        hook = post_local_sgd(mesh["ranks"], 0, post_local_gradient_allreduce=reduces_later)
        reducer = GradientReducer({"a": np.zeros(1)}, hook=hook)
        if dist.get_rank() != 3:
            reducer.ready("a")
        try:
            reducer.wait()
        except dist.DistBackendError as error:
            return str(error).partition("): ")[2].partition(" for")[0]

    told = [None, None, "rank 1 (global rank 3): no gradient" if reduces_later else None, "no gradient"]
    if reduces_later:
        told[3] = told[2]
    assert dist.run(program, 4) == told
