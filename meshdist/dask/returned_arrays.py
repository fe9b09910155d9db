"""Dask arrays out of the DTensors that the ranks of a job returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import dask
import dask.array
import numpy as np
from distributed import Client, Future

from meshdist.arrays.trees import exchanged, values_in
from meshdist.dask.client_calls import settle
from meshdist.dask.partitions import Kept
from meshdist.errors import DistError

_Index = tuple[tuple[int, int], ...]


def dask_arrays(results: Sequence[Any], block: Callable[[int, Kept], Future], client: Client) -> list[Any]:
    """Return the results of the ranks with Dask arrays in place of their DTensors.

    Args:
        results: By rank.
        block: Returns the future of a block that a rank kept.
        client: Of these futures.

    Raises:
        DistError: A DTensor was not returned by all of its ranks.
    """
    found: dict[int, list[tuple[int, Kept]]] = defaultdict(list)
    for rank, result in enumerate(results):
        for kept in values_in(result):
            if isinstance(kept, Kept):
                found[kept.number].append((rank, kept))
    arrays = {number: _array(number, pieces, block, client) for number, pieces in found.items()}
    return [
        exchanged(each, lambda value: arrays[value.number] if isinstance(value, Kept) else value) for each in results
    ]


def _array(number: int, pieces: list[tuple[int, Kept]], block: Callable[[int, Kept], Future], client: Client) -> Any:
    whole = pieces[0][1]
    first: dict[_Index, tuple[int, Kept]] = {}  # replicas are the same
    for rank, kept in pieces:
        if (kept.shape, kept.dtype) != (whole.shape, whole.dtype):
            raise DistError(
                f"run: rank {rank} returned as its DTensor {number} one of shape {kept.shape} and dtype {kept.dtype},"
                f" and rank {pieces[0][0]} of shape {whole.shape} and dtype {whole.dtype}; all ranks must return the"
                " same, in the same order"
            )
        if all(start < end for start, end in kept.index):
            first.setdefault(kept.index, (rank, kept))
    if 0 in whole.shape:
        return dask.array.zeros(whole.shape, dtype=whole.dtype)
    parts = [sorted({index[dim] for index in first}) for dim in range(len(whole.shape))]
    grid = list(product(*parts))
    is_whole = all(
        ends == [*starts[1:], rows]
        for rows, starts, ends in (
            (rows, [start for start, _ in part], [end for _, end in part])
            for rows, part in zip(whole.shape, parts, strict=True)
        )
    )
    if not is_whole or set(grid) != set(first):
        raise DistError(
            f"run: DTensor {number} of those that the ranks returned, of shape {whole.shape}, lacks blocks: all ranks"
            " of its mesh must return it, in the same order"
        )
    futures = {index: block(*first[index]) for index in grid}
    settle(client, futures.values())
    nested = np.empty(tuple(map(len, parts)) or (1,), dtype=object)
    for at, index in zip(np.ndindex(nested.shape), grid, strict=True):
        shape = tuple(end - start for start, end in index)
        nested[at] = dask.array.from_delayed(dask.delayed(futures[index]), shape, dtype=np.dtype(whole.dtype))
    return dask.array.block(nested.tolist()) if whole.shape else nested[0]
