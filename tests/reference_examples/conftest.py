"""Worlds for the documented examples: two, three and four processes over gloo, with and without a default group."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from worlds import WorkerSet, World, Worlds

SIZES = (2, 3, 4)
_linux = pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
_sizes = [pytest.param(size, id=f"{size}-ranks", marks=_linux) for size in SIZES]


@pytest.fixture(params=_sizes)
def initialised(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """Processes that have a default group already: the examples that leave out how it was made."""
    return worlds.world("gloo", request.param)


@pytest.fixture(params=_sizes)
def bare(request: pytest.FixtureRequest, worlds: Worlds) -> Iterator[WorkerSet]:
    """Processes that have done nothing yet: the examples that make the default group themselves."""
    with WorkerSet(worlds.nursery, request.param) as workers:
        yield workers
