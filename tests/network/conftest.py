"""Worlds whose ranks share no memory, though they are on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from worlds import VARIABLES, Crew, Worlds


@pytest.fixture
def tcp_crew(worlds: Worlds) -> Iterator[Callable[..., Crew]]:
    """Make a world of fresh processes that share no memory: `tcp_crew(size, NAME=value)`."""
    with ExitStack() as stack:

        def make(size: int, *, join: bool = True, timeout_s: float = 20.0, **variables: str) -> Crew:
            crew = stack.enter_context(Crew(worlds.nursery, size, {**VARIABLES["gloo-tcp"], **variables}, timeout_s))
            if join:
                crew.join()
            return crew

        yield make
