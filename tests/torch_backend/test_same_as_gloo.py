"""Programs of torch over backend meshdist: the tensors and the losses are those that Gloo gives."""

from __future__ import annotations

from typing import Any

import pytest
from both_backends import BothBackends
from worlds import needs_linux

pytestmark = [needs_linux, pytest.mark.torch, pytest.mark.timeout(100)]

EXACT = (
    "all_reduce",
    "all_reduce_of_views",
    "all_reduce_async",
    "all_reduce_coalesced",
    "sparse",
    "rooted",
    "gathered",
    "reduce_scattered",
    "exchanged",
    "messages",
    "objects",
    "groups",
    "functional",
    "dtensor",
    "single_forms",
    "of_other_shapes",
)
TRAINING = ("ddp", "fsdp", "tensor_parallel")


def equal(ours: Any, theirs: Any) -> bool:
    if hasattr(ours, "dtype"):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bool((ours == theirs).all())
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", EXACT)
def test_every_rank_gets_the_tensors_of_gloo(program: str, size: int, both_backends: BothBackends) -> None:
    theirs = both_backends.run("gloo", size, program)
    ours = both_backends.run("meshdist", size, program)
    for rank in range(size):
        assert equal(ours[rank], theirs[rank]), f"rank {rank}: {ours[rank]}\nGloo: {theirs[rank]}"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", TRAINING)
def test_the_losses_are_those_of_gloo(program: str, size: int, both_backends: BothBackends) -> None:
    theirs = both_backends.run("gloo", size, program)
    ours = both_backends.run("meshdist", size, program)
    flat = [(flatten(mine), flatten(other)) for mine, other in zip(ours, theirs, strict=True)]
    for mine, other in flat:
        assert mine == pytest.approx(other, rel=1e-6)
    assert flat[0][0][0] > flat[0][0][-1], "the loss did not fall"


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)  # inductor runs a C++ compiler
def test_a_compiled_graph_has_the_collectives(compiler: str, both_backends: BothBackends) -> None:
    for in_graph, without in both_backends.run("meshdist", 2, "compiled", compiler):
        assert equal(in_graph, without)


def flatten(losses: Any) -> list[float]:
    return [losses] if isinstance(losses, float) else [each for part in losses for each in flatten(part)]
