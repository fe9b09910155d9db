"""Communication hooks, uneven inputs and model averaging come to the same numbers as torch's."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from torch_trainings import SHAPES, STEPS, averaged_by_torch, batch, by_torch, gradients_of, joined_by_torch

import meshdist as dist
from meshdist.parallel import (
    GradientReducer,
    HierarchicalAverager,
    PeriodicAverager,
    communication_hooks,
    uneven_inputs,
)

differential = Path(__file__).parents[1] / "differential"
EXACT = {"rtol": 1e-6, "atol": 1e-6}
# An average may be rounded to the other of two neighbours, and an error of a step is in the next.
HALF = {"rtol": 1e-3, "atol": 1e-3}
BFLOAT = {"rtol": 1e-2, "atol": 1e-2}
LOW_RANK = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module")
def torch_worlds(tmp_path_factory: pytest.TempPathFactory, monkeypatch_module) -> Iterator[object]:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed; pip install 'meshdist[torch]'")
    monkeypatch_module.syspath_prepend(str(differential))
    from torch_worlds import TorchWorlds

    worlds = TorchWorlds(tmp_path_factory.mktemp("torch"))
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def by_meshdist(make_hook):
    """Return the averages of each step, as one flat array."""
    reducer = GradientReducer({name: np.zeros(shape, "f4") for name, shape in SHAPES.items()}, hook=make_hook())
    found = []
    for step in range(STEPS):
        for name, gradient in gradients_of(step, dist.get_rank()).items():
            reducer.ready(name, gradient)
        reducer.wait()
        found.append(reducer.buckets[0].buffer().copy())
    return found


@pytest.mark.torch
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "make_hook", "options", "close"),
    [
        ("allreduce_hook", lambda: communication_hooks.all_reduce, {}, EXACT),
        ("allreduce_hook", lambda: None, {}, EXACT),
        ("fp16_compress_hook", lambda: communication_hooks.fp16_compress, {}, HALF),
        ("bf16_compress_hook", lambda: communication_hooks.bf16_compress, {}, BFLOAT),
        ("quantization_pertensor_hook", lambda: communication_hooks.quantization_pertensor, {}, EXACT),
        ("quantization_perchannel_hook", lambda: communication_hooks.quantization_perchannel, {}, EXACT),
        *(
            (
                "powerSGD_hook",
                lambda rank=rank, feeds=feeds, warm=warm: communication_hooks.power_sgd(
                    rank, 2, use_error_feedback=feeds, warm_start=warm, min_compression_rate=1
                ),
                {
                    "matrix_approximation_rank": rank,
                    "start_powerSGD_iter": 2,
                    "use_error_feedback": feeds,
                    "warm_start": warm,
                    "min_compression_rate": 1,
                },
                LOW_RANK,
            )
            for rank, feeds, warm in ((1, True, True), (2, True, False), (3, False, True))
        ),
        (
            "batched_powerSGD_hook",
            lambda: communication_hooks.batched_power_sgd(start_iteration=2),
            {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2},
            LOW_RANK,
        ),
    ],
)
def test_the_averages_are_those_of_torchs_hook(torch_worlds, name, make_hook, options, close, size):
    theirs = torch_worlds.run(size, by_torch, name, options)
    ours = dist.run(by_meshdist, size, (make_hook,))
    for rank in range(size):
        for step, (found, due) in enumerate(zip(ours[rank], theirs[rank], strict=True)):
            np.testing.assert_allclose(found, due, **close, err_msg=f"rank {rank}, step {step}")


@pytest.mark.torch
@pytest.mark.parametrize("divide_by_initial", [True, False])
@pytest.mark.parametrize("num_batches", [[2, 4], [3, 0]])
def test_uneven_inputs_come_to_the_weights_of_join(torch_worlds, num_batches, divide_by_initial):
    def program():
        weights = {"w": np.ones((1, 3), np.float32)}
        reducer = GradientReducer(weights)
        rank = dist.get_rank()
        with uneven_inputs(None, reducer, divide_by_initial_world_size=divide_by_initial):
            for step in range(num_batches[rank]):
                x = batch(step, rank)
                gradients = {"w": (2 * (x @ weights["w"].T) * x).mean(axis=0, keepdims=True)}
                weights["w"] -= np.float32(0.5) * reducer.average(gradients)["w"]
        return weights["w"]

    theirs = torch_worlds.run(2, joined_by_torch, num_batches, divide_by_initial)
    for found, due in zip(dist.run(program, 2), theirs, strict=True):
        np.testing.assert_allclose(found, due, rtol=1e-4)


@pytest.mark.torch
@pytest.mark.slow
def test_averagers_average_in_the_steps_of_torchs(torch_worlds):
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
        found = []
        for averager in (PeriodicAverager(3, 2), HierarchicalAverager({2: mesh["ranks"], 4: mesh}, 1)):
            values = []
            for _ in range(10):
                parameter = np.array([float(dist.get_rank())])
                averager.average_parameters([parameter])
                values.append(float(parameter[0]))
            found.append(values)
        return found

    assert dist.run(program, 4) == torch_worlds.run(4, averaged_by_torch, 10)
