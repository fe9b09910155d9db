"""Pairwise algorithms: all_to_all by exchange with several partners at a time, and the dissemination barrier."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from meshdist.arrays.host import Array, split_rows
from meshdist.collectives.algorithms.blocks import COLLECTIVE_TAG, blocks_of, exchange, flat
from meshdist.collectives.algorithms.ring import pass_around
from meshdist.runtime.call import Buffers, Call, Splits
from meshdist.runtime.call_mismatch import compare_splits
from meshdist.runtime.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.runtime.call import Transport

# The number of partners at a time, so that a slow partner does not block the others.
AT_ONCE = 8


def split_blocks(buffers: Buffers, splits: tuple[int, ...] | None, size: int) -> list[Array]:
    """Return the flat block of each rank: `splits` rows each, or the arrays of a list, or equal blocks."""
    if splits is None:
        return blocks_of(buffers, size)
    assert isinstance(buffers, np.ndarray)
    return [buffers[end - rows : end].reshape(-1) for rows, end in zip(splits, accumulate(splits), strict=True)]


def pairwise_all_to_all(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """In step k, send to rank + k and receive from rank - k; several steps at once."""
    rows_to, rows_from = call.splits if call.splits is not None else (None, None)
    give, take = split_blocks(send, rows_to, call.size), split_blocks(recv, rows_from, call.size)
    if call.splits is not None:
        yield from _compare_sizes(transport, call, call.splits, "row")
    elif isinstance(send, list):
        counts = tuple(block.size for block in give), tuple(block.size for block in take)
        yield from _compare_sizes(transport, call, counts, "element")
    yield from exchange_blocks(transport, call, give, take)


def exchange_blocks(transport: Transport, call: Call, give: list[Array], take: list[Array]) -> Iterator[Waitable]:
    """Exchange flat blocks whose sizes are known to agree; see `pairwise_all_to_all`."""
    take[call.rank][...] = give[call.rank]
    for first in range(1, call.size, AT_ONCE):
        steps = range(first, min(first + AT_ONCE, call.size))
        waits: list[Waitable] = []
        for step in steps:
            src = (call.rank - step) % call.size
            waits.append(transport.recv(take[src], src, COLLECTIVE_TAG))
        for step in steps:
            dst = (call.rank + step) % call.size
            waits.append(transport.send(give[dst], dst, COLLECTIVE_TAG))
        yield from waits


def _compare_sizes(transport: Transport, call: Call, mine: Splits, unit: str) -> Iterator[Waitable]:
    sizes = np.zeros((call.size, 2, call.size), np.int64)
    sizes[call.rank] = mine
    yield from pass_around(transport, call, split_rows(sizes, call.size))
    compare_splits(sizes[:, 0], sizes[:, 1], unit, transport.ranks)


def dissemination_barrier(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """After round k, every rank has heard, directly or indirectly, from 2 ** (k + 1) ranks.

    D. Hensgen, R. Finkel, U. Manber: Two algorithms for barrier synchronization, Int. J. Parallel Program. 17 (1988).
    """
    nothing = np.empty(0, np.uint8)
    distance = 1
    while distance < call.size:
        dst, src = (call.rank + distance) % call.size, (call.rank - distance) % call.size
        yield from exchange(transport, flat(nothing), dst, flat(nothing), src)
        distance *= 2
