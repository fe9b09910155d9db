"""Ring algorithms: all_reduce, reduce_scatter and all_gather, bandwidth-optimal on any number of ranks.

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib.
Comput. 69 (2009), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshdist.arrays import Array
from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import blocks_of, exchange, flat, shares_of
from meshdist.quiet import quietly
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend


def ring_all_reduce(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Cut the array into a chunk per rank, reduce-scatter the chunks, then all-gather them."""
    chunks = shares_of(flat(recv), call.size)
    yield from _reduce_around(backend, call, chunks)
    yield from pass_around(backend, call, chunks)


def ring_reduce_scatter(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Reduce the blocks around the ring; a copy is reduced, since the input stays as it is."""
    chunks = [block.copy() for block in blocks_of(send, call.size)]
    yield from _reduce_around(backend, call, chunks)
    flat(recv)[...] = chunks[call.rank]


def ring_all_gather(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Pass the blocks around the ring."""
    blocks = blocks_of(recv, call.size)
    blocks[call.rank][...] = flat(send)
    yield from pass_around(backend, call, blocks)


def _reduce_around(backend: Backend, call: Call, chunks: list[Array]) -> Iterator[Waitable]:
    # In step k, rank r sends chunk r - k - 1, the sum over the k + 1 ranks up to itself, and adds what it
    # receives to chunk r - k - 2; after size - 1 steps chunk r holds all ranks on rank r.
    assert call.op is not None
    rank, size = call.rank, call.size
    for step in range(size - 1):
        mine = chunks[(rank - step - 2) % size]
        received = np.empty_like(mine)
        yield from exchange(backend, chunks[(rank - step - 1) % size], (rank + 1) % size, received, (rank - 1) % size)
        quietly(call.op.ufunc, received, mine, out=mine)
    quietly(call.op.finish, chunks[rank], size)


def pass_around(backend: Backend, call: Call, blocks: list[Array]) -> Iterator[Waitable]:
    """Give every rank's block to all ranks."""
    # In step k, rank r sends block r - k, which it has had since step k - 1, and receives block r - k - 1.
    rank, size = call.rank, call.size
    for step in range(size - 1):
        give, take = blocks[(rank - step) % size], blocks[(rank - step - 1) % size]
        yield from exchange(backend, give, (rank + 1) % size, take, (rank - 1) % size)
