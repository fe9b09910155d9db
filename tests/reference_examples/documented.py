"""How the documented examples are checked: against what they mean, and against what the pages print for their size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from worlds import World

import meshdist as dist


def check(
    world: World,
    program: Callable[..., Any],
    expected: list[Any],
    printed: Mapping[int, list[Any]] | None = None,
    args: tuple[Any, ...] = (),
) -> None:
    """Fail unless `program` returns `expected[rank]`, which is what is printed where the world has a printed size.

    Args:
        world: Where it runs.
        program: Returns lists and numbers.
        expected: What each rank returns, computed in the plainest way.
        printed: World size to what the documentation shows for each rank.
        args: Arguments of the program.
    """
    printed = printed or {}
    assert expected == printed.get(world.size, expected)
    assert world.run(program, *args) == expected


def place() -> tuple[int, int]:
    """Return the rank and the world size."""
    return dist.get_rank(), dist.get_world_size()


def lists(arrays: list[np.ndarray]) -> list[Any]:
    """Return arrays as lists of numbers."""
    return [array.tolist() for array in arrays]
