"""Pairwise algorithms: all_to_all by exchange with some partners at a time, and the dissemination barrier."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from meshdist.arrays import Array, split_rows
from meshdist.call import Buffers, Call, Splits
from meshdist.collectives.algorithms.blocks import COLLECTIVE_TAG, blocks_of, exchange, flat
from meshdist.collectives.algorithms.ring import pass_around
from meshdist.debug.mismatch import compare_splits
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

# With so many partners each rank exchanges at once: who waits for one serves another.
AT_ONCE = 8


def split_blocks(buffers: Buffers, splits: tuple[int, ...] | None, size: int) -> list[Array]:
    """Return the flat block of each rank: `splits` rows for each, or those of a list, or equal ones."""
    if splits is None:
        return blocks_of(buffers, size)
    assert isinstance(buffers, np.ndarray)
    return [buffers[end - rows : end].reshape(-1) for rows, end in zip(splits, accumulate(splits), strict=True)]


def pairwise_all_to_all(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """In step k, send to the rank k further on and receive from the rank k before; some steps at once."""
    rows_to, rows_from = call.splits if call.splits is not None else (None, None)
    give, take = split_blocks(send, rows_to, call.size), split_blocks(recv, rows_from, call.size)
    if call.splits is not None:
        yield from _compare_sizes(backend, call, call.splits, "rows")
    elif isinstance(send, list):
        counts = tuple(block.size for block in give), tuple(block.size for block in take)
        yield from _compare_sizes(backend, call, counts, "elements")
    yield from exchange_blocks(backend, call, give, take)


def exchange_blocks(backend: Backend, call: Call, give: list[Array], take: list[Array]) -> Iterator[Waitable]:
    """Exchange flat blocks whose sizes are known to agree; see `pairwise_all_to_all`."""
    take[call.rank][...] = give[call.rank]
    for first in range(1, call.size, AT_ONCE):
        steps = range(first, min(first + AT_ONCE, call.size))
        waits: list[Waitable] = []
        for step in steps:
            src = (call.rank - step) % call.size
            waits.append(backend.recv(take[src], src, COLLECTIVE_TAG))
        for step in steps:
            dst = (call.rank + step) % call.size
            waits.append(backend.send(give[dst], dst, COLLECTIVE_TAG))
        yield from waits


def _compare_sizes(backend: Backend, call: Call, mine: Splits, unit: str) -> Iterator[Waitable]:
    sizes = np.zeros((call.size, 2, call.size), np.int64)
    sizes[call.rank] = mine
    yield from pass_around(backend, call, split_rows(sizes, call.size))
    compare_splits(sizes[:, 0], sizes[:, 1], unit, backend.options.ranks)


def dissemination_barrier(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """After round k, every rank has heard, directly or not, of 2 ** (k + 1) ranks.

    D. Hensgen, R. Finkel, U. Manber: Two algorithms for barrier synchronization, Int. J. Parallel Program. 17 (1988).
    """
    nothing = np.empty(0, np.uint8)
    distance = 1
    while distance < call.size:
        dst, src = (call.rank + distance) % call.size, (call.rank - distance) % call.size
        yield from exchange(backend, flat(nothing), dst, flat(nothing), src)
        distance *= 2
