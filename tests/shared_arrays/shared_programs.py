"""What ranks do with shared arrays: calls on them, against the same calls on ordinary arrays."""

from __future__ import annotations

import os
from typing import NamedTuple

import calls
import numpy as np

import meshdist as dist
from meshdist.backends.gloo.shm import shm_group
from meshdist.system.platform import cache_bytes

SHARED, VIEW, STRIDED, ORDINARY = "shared", "view of a shared one", "strided shared", "ordinary"


class Example(NamedTuple):
    """A call, and the kinds of array that each rank gives and takes."""

    case: calls.Case
    give: tuple[str, ...]
    take: tuple[str, ...]
    exceeds_caches: bool = False  # the arrays are taken to be more than the caches hold


def placed(content: np.ndarray, kind: str) -> np.ndarray:
    """Return an array of the same elements, of one of the kinds."""
    if kind == ORDINARY:
        return content.copy()
    if kind == SHARED:
        place = dist.empty(content.shape, content.dtype)
    elif kind == VIEW:
        place = dist.empty(content.size + 3, content.dtype)[3:].reshape(content.shape)
    else:
        place = dist.empty((*content.shape, 2), content.dtype)[..., 0]
    place[...] = content
    return place


def wrong_outputs(example: Example) -> list[str]:
    """Make the call, twice; return what is wrong with its outputs, or changed of its inputs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shm_group.cache_bytes = (lambda: 1) if example.exceeds_caches else cache_bytes
    made = calls.make(example.case, rank, size)
    give = [placed(content, example.give[rank]) for content in made.give]
    take = [placed(content, example.take[rank]) for content in made.take]
    found = []
    for turn in ("first", "second"):
        for array, content in zip(take, made.take, strict=True):
            array[...] = content
        result = made.call(give, take, **made.how)
        if isinstance(result, dist.Work):
            result.wait()
        found += [f"{turn} call: input {k}" for k, was in enumerate(made.give) if (give[k] != was).any()]
        found += [f"{turn} call: output {k}" for k, want in enumerate(made.want) if (take[k] != want).any()]
    return found


def random_sums(count: int, salt: int) -> list[str]:
    """Sum random numbers in each way there is; return which of the results are not those of ordinary arrays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    random = np.random.default_rng([salt, rank]).standard_normal(count).astype(np.float32)
    blocks = np.array_split(random, size)
    found = []
    for op in ("sum", "avg"):
        alone = np.concatenate([dist.all_reduce(block, op) for block in np.array_split(random.copy(), 256)])
        for kind in (SHARED, VIEW, ORDINARY):
            total = dist.all_reduce(placed(random, kind), op)
            mine = np.empty_like(blocks[rank])
            dist.reduce_scatter(mine, [placed(block, kind) for block in blocks], op)
            onto = dist.reduce(placed(random, kind), 0, op)
            found += [f"all_reduce {op} {kind}"] * (total.tobytes() != alone.tobytes())
            found += [f"reduce_scatter {op} {kind}"] * (mine.tobytes() != np.array_split(alone, size)[rank].tobytes())
            found += [f"reduce {op} {kind}"] * (onto.tobytes() != (random if rank else alone).tobytes())
    return found


def memfds() -> list[str]:
    """Return the paths of this process's descriptors of shared arrays."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [path for path in paths if os.path.islink(path) and "meshdist-arrays" in os.readlink(path)]


def held_bytes() -> int:
    """Return how much memory this rank's shared arrays hold."""
    return sum(512 * os.stat(path).st_blocks for path in memfds())


def mapped_bytes() -> int:
    """Return how much of anybody's shared arrays this process has mapped."""
    return sum(end - begin for begin, end in mappings())


def is_shared(array: np.ndarray) -> bool:
    """Return whether the elements are in shared memory, of this rank or of another one."""
    first = array.__array_interface__["data"][0]
    return any(begin <= first < end for begin, end in mappings())


def mappings() -> list[tuple[int, int]]:
    """Return where this process has shared arrays: the first address of each, and the one behind it."""
    with open("/proc/self/maps") as maps:
        places = [line.split()[0].split("-") for line in maps if "meshdist-arrays" in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in places]
