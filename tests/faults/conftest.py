"""Worlds to break: fresh processes for every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from worlds import VARIABLES, WorkerSet, Worlds


@pytest.fixture
def new_workers(worlds: Worlds) -> Iterator[Callable[..., WorkerSet]]:
    """Make a world of fresh processes, initialised by default: `new_workers(size, backend)`."""
    with ExitStack() as stack:

        def make(
            size: int, backend: str = "gloo", *, join: bool = True, timeout_s: float = 10.0, **variables: str
        ) -> WorkerSet:
            workers = stack.enter_context(
                WorkerSet(worlds.nursery, size, {**VARIABLES[backend], **variables}, timeout_s)
            )
            if join:
                workers.join()
            return workers

        yield make
