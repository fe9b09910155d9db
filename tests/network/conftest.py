"""Worlds whose ranks share no memory, though they are on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from worlds import VARIABLES, WorkerSet, Worlds


@pytest.fixture
def tcp_workers(worlds: Worlds) -> Iterator[Callable[..., WorkerSet]]:
    """Make a world of fresh processes that share no memory: `tcp_workers(size, NAME=value)`."""
    with ExitStack() as stack:

        def make(size: int, *, join: bool = True, timeout_s: float = 20.0, **variables: str) -> WorkerSet:
            workers = stack.enter_context(
                WorkerSet(worlds.nursery, size, {**VARIABLES["gloo-tcp"], **variables}, timeout_s)
            )
            if join:
                workers.join()
            return workers

        yield make
