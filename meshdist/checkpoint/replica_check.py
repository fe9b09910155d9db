"""Blocks that several ranks hold: whether they have the same elements, as a sample of each tells."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdist.checkpoint.block_owners import Held, Holders
from meshdist.checkpoint.byte_runs import Index
from meshdist.checkpoint.rank_agreement import Peers

# How many elements of a block are compared, evenly spread: 10 us for a large array.
NUM_SAMPLED = 256
# Ranks that compute the same numbers may round them differently. What may differ, of the largest element.
ROUNDING = 0.01


def check_replicas(
    peers: Peers,
    holders: Mapping[str, Holders],
    blocks: Mapping[str, tuple[Index, Any]],
    held: Mapping[str, Mapping[int, Held]],
) -> None:
    """Compare samples of the blocks that several ranks hold; all ranks call it.

    The ranks first exchange a digest for each set of ranks that hold the same blocks. Samples are only exchanged if the
    digests differ.

    Args:
        peers: The ranks.
        holders: The ranks that hold each block, by the array's name.
        blocks: This rank's block of each array: where it is, and its elements.
        held: How each rank holds each array.

    Raises:
        ValueError: A block differs between the ranks that hold it.
    """
    by_holders: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, (index, elements) in blocks.items():
        ranks = holders[name].get(index, ())
        if len(ranks) > 1:
            by_holders.setdefault(ranks, {})[name] = sample_of(elements)
    samples = {_digest(repr(ranks).encode()): of for ranks, of in by_holders.items()}
    told = peers.gather({key: _digest(b"".join(x.tobytes() for x in of.values())) for key, of in samples.items()})
    found: dict[bytes, set[bytes]] = {}
    for of_rank in told:
        for key, digest in of_rank.items():
            found.setdefault(key, set()).add(digest)
    differing = {key for key, digests in found.items() if len(digests) > 1}
    if not differing:
        return
    first_of = {key: next(rank for rank, of_rank in enumerate(told) if key in of_rank) for key in differing}
    firsts = peers.gather({key: samples[key] for key, rank in first_of.items() if rank == peers.rank})

    def compare() -> None:
        for key in sorted(differing & samples.keys()):
            first = first_of[key]
            for name, sample in samples[key].items():
                if not _is_close(sample, firsts[first][key][name]):
                    raise ValueError(_difference(name, held[name], first, peers.rank))

    peers.together(compare)


def sample_of(elements: Any) -> Any:
    """Return some elements of a block, the first and last among them, or all if they are few."""
    if elements.size <= NUM_SAMPLED:
        return np.array(elements).reshape(-1)
    places = np.linspace(0, elements.size - 1, NUM_SAMPLED).astype(np.int64)
    return elements[np.unravel_index(places, elements.shape)]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def _is_close(sample: Any, other: Any) -> bool:
    if sample.dtype.kind in "biu":
        return np.array_equal(sample, other)
    kind = np.complex128 if sample.dtype.kind == "c" else np.float64
    sample, other = sample.astype(kind), other.astype(kind)
    sizes = np.abs(other[np.isfinite(other)])
    return np.allclose(sample, other, rtol=0, atol=ROUNDING * sizes.max(initial=0), equal_nan=True)


def _difference(name: str, held: Mapping[int, Held], first: int, rank: int) -> str:
    """Return what to say of an array whose block on a rank is not that of the first rank that holds it."""
    if held[first].ranks != held[rank].ranks:
        return (
            f"{name!r} is {held[first]} on rank {first} and {held[rank]} on rank {rank}, with different elements: these"
            " are two arrays of one name; give those of each mesh, such as a pipeline stage, a key of their own"
        )
    if held[rank].layout is None:
        return (
            f"{name!r}, {held[rank]}, has different elements on ranks {first} and {rank}; if each rank has an array of"
            " its own, save per_rank(array), or else make it the same on all ranks, as by a broadcast"
        )
    return (
        f"{name!r}, {held[rank]}, has different elements on ranks {first} and {rank}, which hold the same block; make"
        " replicas the same, as by a broadcast, or save per_rank(x.to_local())"
    )
