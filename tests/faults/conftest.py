"""Worlds to break: fresh processes for every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from worlds import VARIABLES, Crew, Worlds


@pytest.fixture
def new_crew(worlds: Worlds) -> Iterator[Callable[..., Crew]]:
    """Make a world of fresh processes, initialised unless told otherwise: `new_crew(size, backend)`."""
    with ExitStack() as stack:

        def make(
            size: int, backend: str = "gloo", *, join: bool = True, timeout_s: float = 10.0, **variables: str
        ) -> Crew:
            crew = stack.enter_context(Crew(worlds.nursery, size, {**VARIABLES[backend], **variables}, timeout_s))
            if join:
                crew.join()
            return crew

        yield make
