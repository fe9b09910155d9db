"""Few bytes in a group with several ranks on some hosts: all ranks come to know all that any of them gives.

The ranks of a host put what they have together in shared memory, the first rank of each host exchanges that with those
of the others, and hands what they have to its host. Each rank then takes, or adds, what it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from meshdist.arrays import Array, as_bytes
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.network.levels import Levels
from meshdist.backends.gloo.network.rail import bytes_of
from meshdist.call import Buffers, Call, num_bytes
from meshdist.collectives.algorithms.blocks import blocks_of, flat
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.barrier import barrier
from meshdist.collectives.broadcast import broadcast
from meshdist.quiet import quiet_runner
from meshdist.waiting import Waitable

# What all ranks together may give.
MOST_BYTES = 64 << 10

# Given what is sent and the row of this rank: puts it there, as bytes.
Putter = Callable[[Any, Array], None]
# Given what each rank has given, as bytes, and the output: writes it.
Taker = Callable[[list[Array], Any], None]


class KnowAll(Plan):
    """All ranks come to know what all give.

    Args:
        levels: The ranks by hosts.
        backend: The backend of the group.
        call: The call.
        sizes: How many bytes each rank gives.
        take: What a rank does when it knows.
        put: How a rank gives.
    """

    copies = True

    def __init__(
        self, levels: Levels, backend: Backend, call: Call, sizes: list[int], take: Taker, put: Putter | None = None
    ) -> None:
        super().__init__(backend, call)
        self._levels = levels
        self._fingerprint = self.signature.fingerprint
        self._put, self._take = put or put_side_by_side, take
        # What a host has is in one piece.
        order = [rank for ranks in levels.hosts for rank in ranks]
        ends = list(accumulate(sizes[rank] for rank in order))
        self._table = np.empty(ends[-1], np.uint8)
        rows = {rank: self._table[end - sizes[rank] : end] for rank, end in zip(order, ends, strict=True)}
        self._rows = [rows[rank] for rank in range(call.size)]
        self._own = rows[call.rank]
        self._here = [rows[rank] for rank in levels.mine]
        begins, host_ends = {}, {}
        for rank, end in zip(order, ends, strict=True):
            begins[rank], host_ends[rank] = end - sizes[rank], end
        self._hosts = [bytes_of(self._table[begins[ranks[0]] : host_ends[ranks[-1]]]) for ranks in levels.hosts]
        plan, outer = levels.plan_here, self.signature
        if ends[-1]:
            self._gather = plan(outer, all_gather, call, send=self._own, recv=self._here)
            self._spread = plan(outer, broadcast, call, send=self._table, recv=self._table, root=0)
        else:
            self._gather = self._spread = plan(outer, barrier, call, send=None, recv=None)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        levels = self._levels
        levels.agreement.begin(self.signature, self._fingerprint)
        if self._own.size:
            self._put(send, self._own)
        yield from levels.run_here(self._gather, self._own, self._here)
        if levels.place == 0:
            yield from levels.crossing(self._exchange())
        yield from levels.run_here(self._spread, self._table, self._table)
        self._take(self._rows, recv)

    def _exchange(self) -> Iterator[Waitable]:
        rail, hosts = self._levels.rail, self._hosts
        assert rail is not None
        rail.begin()
        slots = [rail.expect(peer, hosts[peer]) for peer in rail.others]
        for peer in rail.others:
            rail.send(peer, hosts[rail.place])
        yield rail.coming(slots)
        yield from rail.flush()


def plan_knowing(levels: Levels, backend: Backend, call: Call) -> Plan | None:
    """Return the plan of a call of few bytes; None where it is not one."""
    name = call.collective.native
    make = _TAKERS.get(name)
    if make is None or call.splits is not None:
        return None
    given = num_bytes(call.send) if name != "barrier" else 0
    if name in ("broadcast", "scatter"):
        # What the others give does not count, and what the root scatters they do not know otherwise.
        given = num_bytes(call.recv) * (call.size if name == "scatter" else 1)
        sizes = [given if rank == call.root else 0 for rank in range(call.size)]
    else:
        sizes = [given] * call.size
    if name.startswith("all_gather") and isinstance(call.recv, list):
        sizes = [array.nbytes for array in call.recv]
    return KnowAll(levels, backend, call, sizes, make(call)) if sum(sizes) <= MOST_BYTES else None


def put_side_by_side(send: Buffers, row: Array) -> None:
    """Put what is sent, an array or a list of them, into a row of bytes."""
    end = 0
    for array in send if isinstance(send, list) else [send]:
        assert array is not None
        row[end : end + array.nbytes] = as_bytes(array)
        end += array.nbytes


def _nothing(call: Call) -> Taker:
    return lambda rows, recv: None


def _reduced(call: Call) -> Taker:
    """All rows, added; a part of each for a reduce_scatter."""
    assert call.op is not None
    op, size, rank, root, run = call.op, call.size, call.rank, call.root, quiet_runner()
    scatters = call.collective.native.startswith("reduce_scatter")
    if root not in (None, rank):
        return lambda rows, recv: None
    blocks = [block.nbytes for block in blocks_of(call.send, size)] if scatters else []
    begin, end = sum(blocks[:rank]), sum(blocks[: rank + 1])

    def take(rows: list[Array], recv: Any) -> None:
        total = flat(recv)
        parts = [(row[begin:end] if scatters else row).view(total.dtype) for row in rows]
        run(op.ufunc, parts[0], parts[1], out=total)
        for part in parts[2:]:
            run(op.ufunc, total, part, out=total)
        run(op.finish, total, size)

    return take


def _from_root(call: Call) -> Taker:
    rank, root = call.rank, call.root
    assert root is not None
    scatters = call.collective.native == "scatter"

    def take(rows: list[Array], recv: Any) -> None:
        target = as_bytes(recv)
        begin = rank * target.size if scatters else 0
        target[...] = rows[root][begin : begin + target.size]

    return _nothing(call) if rank == root and not scatters else take


def _gathered(call: Call) -> Taker:
    size = call.size

    def take(rows: list[Array], recv: Any) -> None:
        for block, row in zip(blocks_of(recv, size), rows, strict=True):
            as_bytes(block)[...] = row

    return take if call.root in (None, call.rank) else _nothing(call)


def _exchanged(call: Call) -> Taker:
    size, rank = call.size, call.rank

    def take(rows: list[Array], recv: Any) -> None:
        for block, row in zip(blocks_of(recv, size), rows, strict=True):
            as_bytes(block)[...] = row[rank * block.nbytes : (rank + 1) * block.nbytes]

    return take


_TAKERS: dict[str, Callable[[Call], Taker]] = {
    "barrier": _nothing,
    "all_reduce": _reduced,
    "reduce": _reduced,
    "reduce_scatter": _reduced,
    "reduce_scatter_tensor": _reduced,
    "broadcast": _from_root,
    "scatter": _from_root,
    "gather": _gathered,
    "all_gather": _gathered,
    "all_gather_into_tensor": _gathered,
    "all_to_all_single": _exchanged,
}
