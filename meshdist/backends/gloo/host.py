"""Host: what the ranks of a group on one host share, and how they come by it."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Backend, BackendOptions
from meshdist.backends.gloo.arena import SINGLE_COPY, TOKEN, TRIAL, Arena
from meshdist.backends.gloo.lockstep import Arrival, Lockstep, Members, lockstep_class
from meshdist.backends.gloo.published import Published, check_withdrawn, publish
from meshdist.backends.gloo.routes import Blocks
from meshdist.backends.gloo.segment import Segment, create, find
from meshdist.backends.gloo.sharing import Sharing
from meshdist.backends.gloo.single_copy import Memory, address_of, allow_peers, await_writers, may_copy
from meshdist.backends.gloo.windows import shared_memory
from meshdist.call import Signature
from meshdist.debug.log import RankLog
from meshdist.doorbells import SocketDoorbells
from meshdist.errors import DistBackendError
from meshdist.waiting import Waitable

# What is read, added and forgotten at a time: fits the second-level cache together with what it is added to.
SCRATCH_BYTES = 128 << 10
_SET_UP = Signature("the set-up of the group")
_KEY = "memory"
# What a rank can do with the memory of all others.
_READS, _WRITES = 1, 2
# What peers try to write, and where: it is there as long as the process.
_TRIAL = np.zeros(1, np.int64)
_log = RankLog()
_LEFT_OUT = "making this call"


class Host:
    """The shared memory of a group, and the ways to its ranks.

    Setting it up is the first thing that the ranks do together: the first rank makes the memory and tells the others
    through the store where it is; then they find out whether they can read each other's memory.

    Attributes:
        backend: The backend that it is for.
        arena: The shared memory.
        lockstep: This rank's place in the steps of the group.
        memories: The memory of each rank's process.
        single_copy: Whether all ranks can read each other's memory.
        writes: Whether they can write it as well.
        table_bytes, table_rows: Each of the two tables as bytes, and cut into the ranks' parts.
        byte_slots: For each of the two uses, every rank's slot as bytes.
        sharing: The shared arrays of the ranks.
    """

    def __init__(self, backend: Backend, segment: Segment) -> None:
        options = backend.options
        assert isinstance(options.bells, SocketDoorbells)
        bells, peers, ranks = options.bells, options.peers, options.ranks
        members = Members(
            ended=lambda rank: peers.ended(ranks[rank]),
            how_ended=lambda rank: peers.how_ended(ranks[rank]),
            ring=lambda rank, number: bells.ring(peers.card(ranks[rank]).bells, number),
            describe=options.describe,
            number=options.number,
            ranks=options.ranks_in_messages,
        )
        self.backend = backend
        self._segment = segment
        self.arena = Arena(segment, backend.size)
        self.lockstep = lockstep_class()(self.arena, backend.rank, backend.size, members)
        self.memories = [Memory(peers.card(rank).pid, options.describe(place)) for place, rank in enumerate(ranks)]
        self.single_copy = self.writes = False
        self.table_bytes = [self.arena.table_bytes(use) for use in (0, 1)]
        self.table_rows = [self.arena.table_rows(use) for use in (0, 1)]
        byte, shape = np.dtype(np.uint8), (self.arena.slot_bytes,)
        self.byte_slots = [[self.arena.slot(use, rank, byte, shape) for rank in range(backend.size)] for use in (0, 1)]
        self._areas: dict[tuple[np.dtype[Any], int], list[list[list[Array]]]] = {}
        self._scratch: Array | None = None
        self._reserved = 0
        self._lent: tuple[Blocks, int, int] | None = None
        self.sharing = Sharing(options, self.arena, shared_memory(options))

    def meet(self) -> Iterator[Waitable]:
        """Meet the other ranks for the first time, and find out what all can do with each other's memory."""
        rank, words, line = self.backend.rank, self.arena.words, self.arena.line
        allow_peers()
        token = np.array([os.getpid() ^ id(self)])
        words[line(rank, TOKEN)], words[line(rank, TRIAL)] = address_of(token), address_of(_TRIAL)
        # The token itself stands in the table, to be compared with what is read.
        self.arena.table(0, rank)[rank, 0] = token[0]
        yield self._arrive()
        ranks = range(self.backend.size)
        can_read = may_copy() and all(map(self._can_read, ranks))
        words[line(rank, SINGLE_COPY)] = _READS * can_read | _WRITES * (can_read and all(map(self._can_write, ranks)))
        yield self._arrive()
        self.single_copy = all(words[line(peer, SINGLE_COPY)] & _READS for peer in ranks)
        self.writes = all(words[line(peer, SINGLE_COPY)] & _WRITES for peer in ranks)
        self.arena.seal()
        self._say_what_lacks()

    def _say_what_lacks(self) -> None:
        first_time = self.backend.options.peers.first_time
        if may_copy() and not self.single_copy and first_time("single copy"):
            _log.warning(
                "the ranks of a group may not all read each other's memory (process_vm_readv): what is long is copied"
                " twice"
            )
        if self.single_copy and not self.writes and first_time("writing"):
            _log.warning(
                "the ranks of a group may not all write each other's memory (process_vm_writev): who takes what is long"
                " copies it alone"
            )
        if not self._segment.is_anonymous and first_time("memfd"):
            _log.warning(
                "there is no memfd_create, or it is refused: shared memory lies in /dev/shm, and there may be little of"
                " that"
            )

    def reserve(self, num_bytes: int) -> None:
        """Make sure that there is memory behind the first `num_bytes` of this rank's slots."""
        if num_bytes > self._reserved:
            self.arena.reserve_slots(self.backend.rank, num_bytes)
            self._reserved = num_bytes

    def lend(self, blocks: Blocks, begin: int, end: int) -> None:
        """Say what peers write into once all have posted the word `begin`, and until they have posted `end`."""
        self._lent = blocks, begin, end

    def take_back(self) -> None:
        """Say that all of them have."""
        self._lent = None

    def settle(self) -> None:
        """After this rank has said that its call has failed: wait until no peer writes into its arrays any more."""
        if self._lent is None:
            return
        (blocks, begin, end), self._lent = self._lent, None
        # Where one had not come, nobody has begun, and nobody will: this rank's own post is taken back.
        if self.lockstep.arrived(begin):
            await_writers(lambda: not self.lockstep.underway(end), blocks)

    def scratch(self, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Return memory of this rank alone for two pieces of data."""
        if self._scratch is None:
            self._scratch = np.empty(2 * SCRATCH_BYTES, np.uint8)
        return self._scratch[:SCRATCH_BYTES].view(dtype), self._scratch[SCRATCH_BYTES:].view(dtype)

    def areas(self, dtype: np.dtype[Any], count: int) -> list[list[list[Array]]]:
        """Return, for each of the two uses and the slot of each rank, the areas of `count` elements for each rank."""
        areas = self._areas.get((dtype, count))
        if areas is None:
            ranks, area_bytes = range(self.backend.size), count * dtype.itemsize
            areas = self._areas[dtype, count] = [
                [[self.arena.slot(use, rank, dtype, (count,), area_bytes * area) for area in ranks] for rank in ranks]
                for use in (0, 1)
            ]
        return areas

    def _can_read(self, peer: int) -> bool:
        token = np.zeros(1, np.int64)
        address = self.arena.words[self.arena.line(peer, TOKEN)]
        return self.memories[peer].try_read(address, token) and bool(token[0] == self.arena.table(0, peer)[peer, 0])

    def _can_write(self, peer: int) -> bool:
        return self.memories[peer].try_write(self.arena.words[self.arena.line(peer, TRIAL)], _TRIAL)

    def _arrive(self) -> Waitable:
        return _FirstArrival(self.backend.options, self.lockstep, self.lockstep.post(_SET_UP.fingerprint))


class _FirstArrival(Arrival):
    """All ranks have come to the set-up; one that never will may have no memory yet to say so in."""

    def __init__(self, options: BackendOptions, lockstep: Lockstep, word: int) -> None:
        super().__init__(lockstep, word, _SET_UP)
        self._options = options

    def check(self) -> None:
        self._lockstep.check_states(self.word, _SET_UP)
        for rank in self._lockstep.absent(self.word):
            check_withdrawn(self._options, rank, _LEFT_OUT)
        super().check()


def shared_segment(backend: Backend) -> Generator[Waitable, None, Segment]:
    """Return the memory of a group: the first rank makes it, the others find it."""
    options, num_bytes = backend.options, Arena.num_bytes(backend.size)
    if backend.rank == 0:
        cards = options.peers.cards(options.ranks)
        segment = create(num_bytes, [card.pid for card in cards])
        publish(options, _KEY, segment.place, list(range(1, backend.size)))
        return segment
    place = Published(options, _KEY, 0, _LEFT_OUT)
    yield place
    assert place.value is not None
    try:
        return find(place.value, num_bytes)
    except DistBackendError:
        # The first rank may have given up meanwhile, or left: because of another one, who said why.
        for rank in range(backend.size):
            if rank != backend.rank:
                check_withdrawn(options, rank, _LEFT_OUT)
        raise
