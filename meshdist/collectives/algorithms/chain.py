"""Chains: every rank adds its array to what comes from the rank before, and passes that on.

Long arrays go piece by piece, so that all ranks work at once; the reduction is in rank order. (P. Sanders, J. L. Träff:
Parallel prefix (scan) algorithms for MPI, EuroPVM/MPI 2006, section 3: the pipelined linear algorithm.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshdist.arrays.reduce_op import identity, quietly
from meshdist.collectives.algorithms.blocks import COLLECTIVE_TAG, flat
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.runtime.call import Transport

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
