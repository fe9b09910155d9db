"""Rooted algorithms: binomial trees for broadcast and reduce, direct messages for gather and scatter.

Trees take log2(size) rounds (R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations
in MPICH, Int. J. High Perform. Comput. Appl. 19 (2005), sections 4.2 and 4.4). For gather and scatter a tree would
forward most bytes several times; so all messages go straight to or from the root, posted at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshdist.arrays.reduce_op import quietly
from meshdist.collectives.algorithms.blocks import COLLECTIVE_TAG, blocks_of, flat
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.runtime.call import Transport


def _relatives(call: Call) -> tuple[int | None, list[int]]:
    # Counted from the root, the parent of a rank is the rank without its lowest set bit; its children have one more
    # bit set, below that one. The largest subtree comes first.
    assert call.root is not None
    place = (call.rank - call.root) % call.size
    lowest = place & -place if place else 1 << (call.size - 1).bit_length()
    bits = [1 << k for k in reversed(range(lowest.bit_length() - 1))]
    children = [(place + bit + call.root) % call.size for bit in bits if place + bit < call.size]
    parent = (place - lowest + call.root) % call.size if place else None
    return parent, children


def binomial_broadcast(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    parent, children = _relatives(call)
    array = flat(recv)
    if parent is not None:
        yield transport.recv(array, parent, COLLECTIVE_TAG)
    yield from [transport.send(array, child, COLLECTIVE_TAG) for child in children]


def binomial_reduce(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Add the arrays of the children, then send the sum to the parent; only the root's array is written."""
    assert call.op is not None
    parent, children = _relatives(call)
    total = flat(send).copy()
    received = np.empty_like(total)
    for child in reversed(children):
        yield transport.recv(received, child, COLLECTIVE_TAG)
        quietly(call.op.ufunc, total, received, out=total)
    if parent is None:
        quietly(call.op.finish, total, call.size)
        flat(recv)[...] = total
    else:
        yield transport.send(total, parent, COLLECTIVE_TAG)


def star_gather(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    assert call.root is not None
    if call.rank != call.root:
        yield transport.send(flat(send), call.root, COLLECTIVE_TAG)
        return
    blocks = blocks_of(recv, call.size)
    blocks[call.rank][...] = flat(send)
    peers = [peer for peer in range(call.size) if peer != call.rank]
    yield from [transport.recv(blocks[peer], peer, COLLECTIVE_TAG) for peer in peers]


def star_scatter(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    assert call.root is not None
    if call.rank != call.root:
        yield transport.recv(flat(recv), call.root, COLLECTIVE_TAG)
        return
    blocks = blocks_of(send, call.size)
    flat(recv)[...] = blocks[call.rank]
    peers = [peer for peer in range(call.size) if peer != call.rank]
    yield from [transport.send(blocks[peer], peer, COLLECTIVE_TAG) for peer in peers]
