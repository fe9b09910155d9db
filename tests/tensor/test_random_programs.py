"""Random programs of NumPy calls give on a mesh what they give on whole arrays; see `random_programs`."""

from __future__ import annotations

import pytest
from random_programs import run_programs

import meshdist

FEW = {1: 40, 2: 80, 3: 60, 4: 60}
MANY = {1: 160, 2: 420, 3: 340, 4: 340, 5: 250, 6: 250}


def failures(ranks: int, first: int, programs: int) -> dict[int, str]:
    return meshdist.run(run_programs, ranks, (range(first, first + programs),), timeout=30)[0]


@pytest.mark.parametrize("ranks", FEW)
def test_few_programs(ranks: int) -> None:
    assert failures(ranks, 0, FEW[ranks]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MANY)
def test_many_programs(ranks: int) -> None:
    assert failures(ranks, 1000, MANY[ranks]) == {}
