"""Rings and chains: every rank receives from the rank before it and sends to the one behind it.

Rings: all_reduce, reduce_scatter and all_gather, bandwidth-optimal on any number of ranks. P. Patarasuk, X. Yuan:
Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib. Comput. 69 (2009), section 3.

Chains: scan and exscan, in rank order. Long arrays go piece by piece, so that all ranks work at once. P. Sanders, J. L.
Träff: Parallel prefix (scan) algorithms for MPI, EuroPVM/MPI 2006, section 3: the pipelined linear algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import identity, quietly
from meshdist.collectives.algorithms.blocks import COLLECTIVE_TAG, blocks_of, exchange, flat, shares_of
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.runtime.call import Transport


def ring_all_reduce(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Cut the array into a chunk per rank, reduce-scatter the chunks, then all-gather them."""
    chunks = shares_of(flat(recv), call.size)
    yield from _reduce_around(transport, call, chunks)
    yield from pass_around(transport, call, chunks)


def ring_reduce_scatter(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Reduce copies of the blocks around the ring; the input stays unchanged."""
    chunks = [block.copy() for block in blocks_of(send, call.size)]
    yield from _reduce_around(transport, call, chunks)
    flat(recv)[...] = chunks[call.rank]


def ring_all_gather(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    blocks = blocks_of(recv, call.size)
    blocks[call.rank][...] = flat(send)
    yield from pass_around(transport, call, blocks)


def _reduce_around(transport: Transport, call: Call, chunks: list[Array]) -> Iterator[Waitable]:
    # In step k, rank r sends chunk r - k - 1, the sum over the k + 1 ranks up to itself, and adds what it
    # receives to chunk r - k - 2; after size - 1 steps chunk r holds all ranks on rank r.
    assert call.op is not None
    rank, size = call.rank, call.size
    for step in range(size - 1):
        mine = chunks[(rank - step - 2) % size]
        received = np.empty_like(mine)
        yield from exchange(transport, chunks[(rank - step - 1) % size], (rank + 1) % size, received, (rank - 1) % size)
        quietly(call.op.ufunc, received, mine, out=mine)
    quietly(call.op.finish, chunks[rank], size)


def pass_around(transport: Transport, call: Call, blocks: list[Array]) -> Iterator[Waitable]:
    # In step k, rank r sends block r - k, which it has had since step k - 1, and receives block r - k - 1.
    rank, size = call.rank, call.size
    for step in range(size - 1):
        give, take = blocks[(rank - step) % size], blocks[(rank - step - 1) % size]
        yield from exchange(transport, give, (rank + 1) % size, take, (rank - 1) % size)


# A piece is passed on while the next one is added; each one is a message.
_PIECE_BYTES = 256 << 10


def chain_scan(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Reduce the arrays of the ranks up to this one, in place."""
    return _along_the_chain(transport, call, recv, exclusive=False)


def chain_exscan(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Reduce the arrays of the ranks before this one, in place."""
    return _along_the_chain(transport, call, recv, exclusive=True)


def _along_the_chain(transport: Transport, call: Call, recv: Buffers, *, exclusive: bool) -> Iterator[Waitable]:
    assert call.op is not None
    array, sent = flat(recv), []
    count = max(1, _PIECE_BYTES // array.itemsize)
    for begin in range(0, max(1, array.size), count):
        own = array[begin : begin + count]
        before = np.empty_like(own)
        if call.rank > 0:
            yield transport.recv(before, call.rank - 1, COLLECTIVE_TAG)
        else:
            before.fill(identity(call.op, own.dtype))
        total = own.copy() if exclusive else own
        if call.rank > 0:
            quietly(call.op.ufunc, before, own, out=total)
        if exclusive:
            own[...] = before
        if call.rank + 1 < call.size:
            sent.append(transport.send(total, call.rank + 1, COLLECTIVE_TAG))
    yield from sent
