"""Data movement: the plans that carry out a route.

What fits into the slots goes through them in one step, more in chunks. Still more goes, where peers' memory can be
read and written, in one copy straight from the giver's array into the taker's: the ranks tell each other in the table
where their blocks lie, meet, copy, and meet again before anyone may change its array. Out of shared arrays it needs no
kernel: see in_place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Plan
from meshdist.backends.gloo.arena import PAGE
from meshdist.backends.gloo.copying import CopyingPlan
from meshdist.backends.gloo.in_place import SharedMove
from meshdist.backends.gloo.lockstep import Arrival, LockstepPlan, OneStep
from meshdist.backends.gloo.routes import Blocks, Route
from meshdist.call import Buffers, Call, Signature
from meshdist.debug.mismatch import compare_splits

if TYPE_CHECKING:
    from meshdist.backends.gloo.host import Host

# The longest block that moves through the slots where the kernel could copy it: it takes longer to find the pages of a
# block than the processor to copy it twice, as long as the slots stay in the cache, and while one rank copies in the
# next chunk the others copy out the last. Measured on 2 and 4 ranks, on 2 cores.
CHUNKED_BYTES = 16 << 20
# Of blocks for one rank each, where all ranks give and where one does, times the cube of the number of ranks: that many
# more there are, they share the slots, and here the cores.
CHUNKED_BYTES_OF_ALL, CHUNKED_BYTES_OF_ONE = 64 << 20, 8 << 20
# Of blocks that each rank writes into the memory of the one that takes them: all work at once, as through the slots.
CHUNKED_BYTES_WRITTEN = 2 << 20
# So much is in a slot at a time where all ranks give one block for all, or one rank gives a block for each: the slots
# are to stay in the cache. In a broadcast, which uses one slot, and an exchange it is all that a slot holds: broadcasts
# of 4 MiB took three quarters of the time so, exchanges of as much five sixths, and all-gathers a quarter more.
_SHORT_CHUNK = 256 << 10

_NOTHING = np.empty(0, np.uint8)


def plan_movement(host: Host, call: Call, route: Route) -> Plan:
    """Return the plan that carries out `route` fastest."""
    if route.longest is None:
        return AgreedMove(host, call, route)
    if route.put_bytes is not None and route.put_bytes <= host.arena.slot_bytes:
        host.reserve(route.put_bytes)
        return SlotMove(host, call, route)
    way = ChunkedMove if moves_in_chunks(host, route, route.longest) else SingleCopyMove
    return SharedMove(host, call, route, way(host, call, route))


def moves_in_chunks(host: Host, route: Route, longest: int) -> bool:
    """Return whether blocks of up to `longest` bytes are moved fastest in chunks through the slots."""
    if not host.single_copy:
        return True
    if route.shared:
        return longest <= (CHUNKED_BYTES_WRITTEN if route.written == 1 and host.writes else CHUNKED_BYTES)
    return longest * host.backend.size**3 <= (CHUNKED_BYTES_OF_ALL if route.giver is None else CHUNKED_BYTES_OF_ONE)


class SlotMove(OneStep):
    """Few bytes: through the slots in one step."""

    def __init__(self, host: Host, call: Call, route: Route) -> None:
        super().__init__(host.lockstep, host.backend, call)
        self._puts = [route.puts(host.arena, use) for use in (0, 1)]
        self._takes = [route.takes(host.arena, use) for use in (0, 1)]

    def put(self, send: Any, use: int) -> None:
        put(send, self._puts[use])

    def take(self, recv: Any, use: int) -> None:
        place = self._takes[use]
        if type(place) is list:
            for peer, part in enumerate(place):
                recv[peer][...] = part
        elif place is not None:
            (recv if recv.shape == place.shape else recv.reshape(place.shape))[...] = place


def put(send: Any, place: Any) -> None:
    """Copy what is sent, an array or a list of them, to its place in a slot, if it has one."""
    if type(place) is list:
        for peer, part in enumerate(place):  # a strict zip takes longer
            part[...] = send[peer]
    elif place is not None:
        place[...] = send


class BulkMove(CopyingPlan):
    """What carrying out a route by chunks or by single copies has in common.

    Attributes:
        longest: Bytes of the longest block of any rank.
    """

    def __init__(self, host: Host, call: Call, route: Route) -> None:
        super().__init__(host, call)
        self.route = route
        self.longest = route.longest or 0


class SingleCopyMove(BulkMove):
    """Many bytes, one copy: read straight from the giver's array, or written straight into the taker's."""

    def __init__(self, host: Host, call: Call, route: Route) -> None:
        super().__init__(host, call, route)
        self._written = route.written if host.writes else 0

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        give, take = self.route.give(send), self.route.take(recv)
        use = self.announce(give, take)
        if self._written:
            self.host.lend(take, *(self.lockstep.next_word(self.fingerprint, steps) for steps in (1, 2)))
        yield self.arrive()
        _keep_own(give[self.rank], take[self.rank])
        for peer in self.others():
            address, _, wanted, target = self.host.arena.table(use, peer)[self.rank].tolist()
            given, taken = _bytes(give[peer]), _bytes(take[peer])
            self.read(peer, address, taken[: self._read(taken.size)])
            if wanted and self._written:
                begin = self._read(wanted)
                self.write(peer, target + begin, given[begin:wanted])
        yield self.arrive()
        self.host.take_back()

    def _read(self, num_bytes: int) -> int:
        """Return how many bytes of a block its taker reads; whole pages of them."""
        return int(num_bytes * (1 - self._written)) & -PAGE if self._written else num_bytes


class ChunkedMove(BulkMove):
    """Many bytes through the slots: chunk by chunk, using the two slots in turn."""

    def __init__(self, host: Host, call: Call, route: Route) -> None:
        super().__init__(host, call, route)
        self._room = host.arena.slot_bytes
        is_broadcast_or_exchange = route.shared == (route.giver is not None)
        if not is_broadcast_or_exchange:
            self._room = min(self._room, _SHORT_CHUNK)
        host.reserve(self._room)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        give, take = self.route.give(send), self.route.take(recv)
        _keep_own(give[self.rank], take[self.rank])
        given, taken = [_bytes(block) for block in give], [_bytes(block) for block in take]
        # A shared block has the slot to itself; else there is an area for each rank.
        shared = self.route.shared
        chunk = self._room // (1 if shared else self.size)
        for begin in range(0, self.longest, chunk):
            slots = self.host.byte_slots[self.lockstep.flip()]
            for peer in self.others()[:1] if shared else self.others():
                part = given[peer][begin : begin + chunk]
                area = 0 if shared else peer * chunk
                slots[self.rank][area : area + part.size] = part
            yield self.arrive()
            for peer in self.others():
                part = taken[peer][begin : begin + chunk]
                area = 0 if shared else self.rank * chunk
                part[...] = slots[peer][area : area + part.size]


class AgreedMove(LockstepPlan):
    """An exchange whose sizes only the ranks together know.

    In the first step each rank puts the sizes of its blocks into the table and, if they are short, the blocks into its
    slot. All ranks look at all sizes: all raise if two ranks disagree, and all see whether every rank's blocks were
    short. If not, the blocks take the way of long ones.
    """

    def __init__(self, host: Host, call: Call, route: Route) -> None:
        super().__init__(host.lockstep, host.backend, call)
        give, take = route.give(call.send), route.take(call.recv)
        assert all(block is not None for block in (*give, *take))
        self._host, self._route, self._rank = host, route, call.rank
        self._limit = host.arena.slot_bytes
        ways = SingleCopyMove, ChunkedMove
        self._bulks = [SharedMove(host, call, route, way(host, call, route)) for way in ways]
        self._bulk = self._bulks[0]
        self._dtype = give[0].dtype  # type: ignore[union-attr]
        # A list's arrays are copied as they are: to make them flat costs more than to copy a few bytes.
        self._shapes = [block.shape for block in (call.recv if isinstance(call.recv, list) else take)]  # type: ignore[union-attr]
        given, taken = [[block.nbytes for block in blocks] for blocks in (give, take)]  # type: ignore[union-attr]
        self._sizes = np.array([[0, to, come, 0] for to, come in zip(given, taken, strict=True)], np.int64).tobytes()
        self._puts: list[Any] | None = None
        if sum(given) <= self._limit:
            host.reserve(sum(given))
            self._puts = [route.puts(host.arena, use) for use in (0, 1)]
        # What the table showed when it was last found right, and where the short blocks are then.
        self._agreed = b""
        self._takes: list[list[Array]] | None = None

    def stand_for(self, signature: Signature) -> None:
        super().stand_for(signature)
        for bulk in self._bulks:
            bulk.stand_for(signature)

    def run(self, send: Buffers, recv: Buffers) -> None:
        use = self._put(send)
        self.lockstep.meet(self)
        if not self._take(recv, use):
            self._bulk.run(send, recv)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        use = self._put(send)
        yield self.arrive()
        if not self._take(recv, use):
            yield from self._bulk.steps(send, recv)

    def _put(self, send: Buffers) -> int:
        use = self.lockstep.flip()
        self._host.table_rows[use][self._rank][:] = self._sizes
        if self._puts is not None:
            put(send, self._puts[use])
        return use

    def _take(self, recv: Buffers, use: int) -> bool:
        if self._host.table_bytes[use].tobytes() != self._agreed:
            self._compare(use)
        if self._takes is None:
            return False
        blocks: Blocks = recv if isinstance(recv, list) else self._route.take(recv)
        for peer, place in enumerate(self._takes[use]):
            blocks[peer][...] = place  # type: ignore[index]
        return True

    def _compare(self, use: int) -> None:
        table = self._host.table_bytes[use]
        size, row_bytes = self.backend.size, self._route.row_bytes
        sizes = np.frombuffer(table, np.int64).reshape(size, size, -1)
        given, expected = sizes[:, :, 1], sizes[:, :, 2]
        compare_splits(given // row_bytes, expected // row_bytes, self._route.unit, self.backend.options.ranks)
        self._agreed = bytes(table)
        longest = int(given.max())
        self._bulk = self._bulks[moves_in_chunks(self._host, self._route, longest)]
        self._bulk.longest = longest
        self._takes = None
        if given.sum(axis=1).max() <= self._limit:
            begins = given[:, : self._rank].sum(axis=1).tolist()
            self._takes = [self._places(k, begins) for k in (0, 1)]

    def _places(self, use: int, begins: Sequence[int]) -> list[Array]:
        slot, blocks = self._host.arena.slot, zip(self._shapes, begins, strict=True)
        return [slot(use, peer, self._dtype, shape, begin) for peer, (shape, begin) in enumerate(blocks)]


def _bytes(block: Array | None) -> Array:
    return _NOTHING if block is None else block.view(np.uint8)


def _keep_own(give: Array | None, take: Array | None) -> None:
    if give is not None and take is not None:
        take[...] = give
