"""What mesh_scale.py times, in a fresh interpreter: `python scale.py meshdist` prints JSON, case to seconds.

One rank of a world that is not there makes meshes: with meshdist in a dry run, with torch over its fake backend.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations, permutations
from time import perf_counter
from typing import Any, NamedTuple

SLICES_S = 0.05
AXES = ("pp", "dp", "cp", "tp")


class Scaled(NamedTuple):
    """A library, as far as it is timed here.

    Attributes:
        world: Begins a world of that many ranks, and ends it.
        init_device_mesh: Its function of that name.
        pairs: From the names of the axes, those that it can slice a mesh by two at a time.
    """

    world: Callable[[int], AbstractContextManager[Any]]
    init_device_mesh: Callable[..., Any]
    pairs: Callable[[tuple[str, ...], int], Iterator[tuple[str, ...]]]


def meshdist() -> Scaled:
    import meshdist as dist

    return Scaled(dist.dry_run, dist.init_device_mesh, permutations)


def torch() -> Scaled:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    @contextmanager
    def world(size: int) -> Iterator[None]:
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        yield
        dist.destroy_process_group()

    return Scaled(world, init_device_mesh, combinations)


def elapsed_s(function: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    begin = perf_counter()
    function()
    return perf_counter() - begin


def again_s(mesh: Any) -> float:
    """Return how long `mesh["tp"]` takes when it was asked for before: the mean over about SLICES_S."""
    repeats = max(3, min(100_000, round(SLICES_S / max(elapsed_s(lambda: mesh["tp"]), 1e-7))))
    begin = perf_counter()
    for _ in range(repeats):
        mesh["tp"]
    return (perf_counter() - begin) / repeats


def square(library: Scaled, side: int) -> dict[str, float]:
    """Time the square mesh of a world of `side` * `side` ranks."""
    size = side * side
    world = library.world(size)
    times = {f"world of {size}": elapsed_s(world.__enter__)}
    made: list[Any] = []
    try:
        times[f"mesh of {side} x {side}"] = elapsed_s(
            lambda: made.append(library.init_device_mesh("cpu", (side, side), mesh_dim_names=("dp", "tp")))
        )
        times[f"first slice of {size}"] = elapsed_s(lambda: made[0]["tp"])
        times[f"slice of {size}"] = again_s(made[0])
    finally:
        world.__exit__(None, None, None)
    return times


def large(library: Scaled) -> dict[str, float]:
    """Time a mesh of four axes with the groups of all axes and all slices of two."""

    def make() -> None:
        mesh = library.init_device_mesh("cpu", (64, 32, 32, 2), mesh_dim_names=AXES)
        for axis in AXES:
            mesh.get_group(axis)
        for pair in library.pairs(AXES, 2):
            mesh[pair]

    with library.world(131_072):
        return {"mesh of 64 x 32 x 32 x 2": elapsed_s(make)}


def main() -> None:
    library = {"meshdist": meshdist, "torch": torch}[sys.argv[1]]()
    square(library, 2)  # what is imported or compiled by the first use is not to be timed
    print(json.dumps({**square(library, 16), **square(library, 256), **large(library)}))


if __name__ == "__main__":
    main()
