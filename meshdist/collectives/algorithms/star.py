"""Star algorithms: gather and scatter by messages straight to and from the root, all posted at once.

A tree has fewer rounds, but passes most bytes on several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import COLLECTIVE_TAG, blocks_of, flat
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend


def star_gather(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """All send to the root."""
    assert call.root is not None
    if call.rank != call.root:
        yield backend.send(flat(send), call.root, COLLECTIVE_TAG)
        return
    blocks = blocks_of(recv, call.size)
    blocks[call.rank][...] = flat(send)
    peers = [peer for peer in range(call.size) if peer != call.rank]
    yield from [backend.recv(blocks[peer], peer, COLLECTIVE_TAG) for peer in peers]


def star_scatter(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """The root sends to all."""
    assert call.root is not None
    if call.rank != call.root:
        yield backend.recv(flat(recv), call.root, COLLECTIVE_TAG)
        return
    blocks = blocks_of(send, call.size)
    flat(recv)[...] = blocks[call.rank]
    peers = [peer for peer in range(call.size) if peer != call.rank]
    yield from [backend.send(blocks[peer], peer, COLLECTIVE_TAG) for peer in peers]
