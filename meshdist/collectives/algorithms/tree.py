"""Binomial trees: broadcast and reduce in log2(size) rounds.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, Int. J. High
Perform. Comput. Appl. 19 (2005), sections 4.2 and 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshdist.call import Buffers, Call
from meshdist.collectives.algorithms.blocks import COLLECTIVE_TAG, flat
from meshdist.quiet import quietly
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend


def _family(call: Call) -> tuple[int | None, list[int]]:
    # Counted from the root, the parent of a rank is the rank without its lowest set bit, and its children
    # are the rank with one bit set below that; the largest subtree comes first.
    assert call.root is not None
    place = (call.rank - call.root) % call.size
    lowest = place & -place if place else 1 << (call.size - 1).bit_length()
    bits = [1 << k for k in reversed(range(lowest.bit_length() - 1))]
    children = [(place + bit + call.root) % call.size for bit in bits if place + bit < call.size]
    parent = (place - lowest + call.root) % call.size if place else None
    return parent, children


def binomial_broadcast(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Receive from the parent, then send to the children."""
    parent, children = _family(call)
    array = flat(recv)
    if parent is not None:
        yield backend.recv(array, parent, COLLECTIVE_TAG)
    yield from [backend.send(array, child, COLLECTIVE_TAG) for child in children]


def binomial_reduce(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    """Add what the children send, then send the sum to the parent; only the root's array is written."""
    assert call.op is not None
    parent, children = _family(call)
    total = flat(send).copy()
    received = np.empty_like(total)
    for child in reversed(children):
        yield backend.recv(received, child, COLLECTIVE_TAG)
        quietly(call.op.ufunc, total, received, out=total)
    if parent is None:
        quietly(call.op.finish, total, call.size)
        flat(recv)[...] = total
    else:
        yield backend.send(total, parent, COLLECTIVE_TAG)
