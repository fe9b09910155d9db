"""The communication hooks come to the same averages as torch's, from the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hook_programs import SHAPES, STEPS, by_torch, gradients_of

import meshdist as dist
from meshdist.parallel import GradientReducer, communication_hooks

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
