"""Gradients through collectives, and of a program, against torch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import meshdist
import meshdist.autograd as ag

PROGRAM = Path(__file__).with_name("torch_gradients.py")
FUNCTIONS: dict[str, Any] = {
    "all_reduce sum": lambda x: ag.all_reduce(x, grad="reduce"),
    "broadcast": lambda x: ag.broadcast(x, 1),
    "all_gather": lambda x: anp.concatenate(ag.all_gather(x)),
    "all_to_all_single": ag.all_to_all,
    "gathered": lambda x: ag.all_gather(x, axis=0),
    "scattered": ag.reduce_scatter,
    "exchanged": ag.all_to_all,
}


@pytest.mark.torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2])
def test_collectives_have_the_gradients_of_torch(size: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "gradients"
    ranks = [
        subprocess.Popen([sys.executable, PROGRAM, str(rank), str(size), str(tmp_path / "rendezvous"), str(output)])
        for rank in range(size)
    ]
    try:
        assert [rank.wait(100) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

    def main() -> dict[str, Any]:
        rank = meshdist.get_rank()
        x = np.random.default_rng(rank).standard_normal((4 * size, 2))
        found = {}
        for name, function in FUNCTIONS.items():
            weights = np.random.default_rng(10 + rank).standard_normal(np.shape(function(x)))
            found[name] = ag.grad(lambda x, f=function, w=weights: anp.sum(w * anp.tanh(f(x))))(x)
        return found

    compared = set()
    for rank, found in enumerate(meshdist.run(main, size)):
        with np.load(f"{output}-{rank}.npz") as theirs:
            for name, gradient in theirs.items():
                np.testing.assert_allclose(found[name], gradient, err_msg=f"{name} on rank {rank}")
                compared.add(name)
    assert compared == FUNCTIONS.keys()
