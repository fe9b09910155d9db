"""Blocks that several ranks hold: whether they have the same elements, as a sample of each tells."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from meshdist.checkpoint.block_owners import Held, block_on, holders_of
from meshdist.checkpoint.rank_agreement import Peers

# How many elements of a block are compared, evenly spread: 10 us for a large array.
NUM_SAMPLED = 256
# Ranks that compute the same numbers may round them differently. What may differ, of the largest element.
ROUNDING = 0.01

# The arrays of which this rank shares its block with others, for each set of ranks that hold the same blocks.
Shared: TypeAlias = "dict[bytes, list[str]]"
# For each such set, a digest of the samples of these blocks on this rank.
Digests: TypeAlias = "dict[bytes, bytes]"


def shared_blocks(rank: int, held: Mapping[str, Mapping[int, Held]]) -> Shared:
    """Return which blocks of a rank other ranks hold as well, before any rows are exchanged.

    Args:
        rank: The rank.
        held: How each rank holds each array; ranks list the arrays in the same order.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name, by_rank in held.items():
        if rank in by_rank:
            source = next(iter(by_rank.values())).source
            ranks = holders_of(by_rank, source)[block_on(rank, by_rank[rank], by_rank[rank].source)]
            if len(ranks) > 1:
                found.setdefault(ranks, []).append(name)
    return {_digest(repr(ranks).encode()): names for ranks, names in found.items()}


def digests_of(shared: Shared, blocks: Mapping[str, Any]) -> Digests:
    """Return digests of the samples of this rank's blocks."""
    return {key: _digest(b"".join(sample_of(blocks[x]).tobytes() for x in names)) for key, names in shared.items()}


def check_replicas(
    peers: Peers, told: Sequence[Digests], shared: Shared, blocks: Mapping[str, Any], held: Mapping[str, Held]
) -> None:
    """Compare the blocks that several ranks hold; all ranks call it. Samples are exchanged only if digests differ.

    Args:
        peers: The ranks.
        told: The digests of all ranks.
        shared: Which blocks others hold as well.
        blocks: This rank's block of each array.
        held: How this rank holds each array.

    Raises:
        ValueError: A block differs between the ranks that hold it.
    """
    first_of: dict[bytes, int] = {}
    differing: set[bytes] = set()
    for rank, of_rank in enumerate(told):
        for key, digest in of_rank.items():
            if digest != told[first_of.setdefault(key, rank)][key]:
                differing.add(key)
    if not differing:
        return
    samples = {key: {name: sample_of(blocks[name]) for name in names} for key, names in shared.items()}
    own = {
        key: [(held[name], x) for name, x in samples[key].items()] for key in differing if first_of[key] == peers.rank
    }
    firsts = peers.gather(own)

    def compare() -> None:
        for key in sorted(differing & samples.keys()):
            first = first_of[key]
            for (name, sample), (first_held, other) in zip(samples[key].items(), firsts[first][key], strict=True):
                if not _is_close(sample, other):
                    raise ValueError(_difference(name, first_held, first, held[name], peers.rank))

    peers.together(compare)


def sample_of(elements: Any) -> Any:
    """Return some elements of a block, the first and last among them, or all if they are few."""
    if elements.size <= NUM_SAMPLED:
        return np.array(elements).reshape(-1)
    return elements[_sampled_places(elements.shape)]


@lru_cache(maxsize=1000)
def _sampled_places(shape: tuple[int, ...]) -> tuple[Any, ...]:
    places = np.linspace(0, math.prod(shape) - 1, NUM_SAMPLED).astype(np.int64)
    return np.unravel_index(places, shape)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def _is_close(sample: Any, other: Any) -> bool:
    if sample.dtype.kind in "biu":
        return np.array_equal(sample, other)
    kind = np.complex128 if sample.dtype.kind == "c" else np.float64
    sample, other = sample.astype(kind), other.astype(kind)
    sizes = np.abs(other[np.isfinite(other)])
    return np.allclose(sample, other, rtol=0, atol=ROUNDING * sizes.max(initial=0), equal_nan=True)


def _difference(name: str, first_held: Held, first: int, held: Held, rank: int) -> str:
    """Return what to say of an array whose block on a rank is not that of the first rank that holds it."""
    if first_held.ranks != held.ranks:
        return (
            f"{name!r} is {first_held} on rank {first} and {held} on rank {rank}, with different elements: these are"
            " two arrays of one name; give those of each mesh, such as a pipeline stage, a key of their own"
        )
    if held.layout is None:
        return (
            f"{name!r}, {held}, has different elements on ranks {first} and {rank}; if each rank has an array of its"
            " own, save per_rank(array), or else make it the same on all ranks, as by a broadcast"
        )
    return (
        f"{name!r}, {held}, has different elements on ranks {first} and {rank}, which hold the same block; make"
        " replicas the same, as by a broadcast, or save per_rank(x.to_local())"
    )
