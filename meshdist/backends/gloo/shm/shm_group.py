"""ShmGroup: what the ranks of a group on one host share, and its setup."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.base import Backend
from meshdist.backends.gloo.published import Published, check_why_removed, check_withdrawn, publish
from meshdist.backends.gloo.shm.cache_distance import CacheDistance
from meshdist.backends.gloo.shm.descriptors import SharedDescriptors
from meshdist.backends.gloo.shm.flag_barrier import BarrierWait, FlagBarrier, PeerSet
from meshdist.backends.gloo.shm.flag_barrier_kinds import flag_barrier_class
from meshdist.backends.gloo.shm.mapping_cache import shared_memory
from meshdist.backends.gloo.shm.segment import Segment, create, find
from meshdist.backends.gloo.shm.shared_region import ABILITIES, TOKEN, TRIAL, TUNING, SharedRegion, Slots
from meshdist.backends.gloo.shm.single_copy import Memory, address_of, allow_peers, await_writers, may_copy
from meshdist.backends.gloo.shm.spreading import spread_ranks
from meshdist.backends.gloo.shm.tuning import Mode, Tuning
from meshdist.collectives.dataflow import Blocks
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Call, each
from meshdist.runtime.call_mismatch import SET_UP
from meshdist.runtime.departure import LeftOut
from meshdist.runtime.doorbells import SocketDoorbells
from meshdist.runtime.log import RankLog
from meshdist.runtime.waiting import Waitable
from meshdist.system.env_flags import tuning_mode
from meshdist.system.platform import cache_bytes, cores, local_world_size
from meshdist.system.tuning_cache import TuningCache

# Size of one piece of scratch: fits the second-level cache together with what it is added to.
SCRATCH_BYTES = 128 << 10
_KEY = "memory"
# What a rank can do with the memory of all others; it has the core; it sees a core for each rank of its host.
_READS, _WRITES, _COMPILED, _HAS_CORES = 1, 2, 4, 8
# The target of the peers' trial writes; it lives as long as the process.
_TRIAL = np.zeros(1, np.int64)
_log = RankLog()


class ShmGroup:
    """The shared memory of a group.

    The setup is the first thing that the ranks do together: rank 0 creates the memory and publishes its place in the
    store; then the ranks find out whether they can read each other's memory.

    Attributes:
        barrier: This rank's view of the group's steps.
        memories: The memory of each rank's process.
        single_copy: Whether all ranks can read each other's memory.
        writes: Whether they can write it as well.
        compiled: Whether all ranks have the compiled core.
        table_bytes, table_rows: For each phase, the table as bytes, and cut into the ranks' rows.
        byte_slots: For each phase, every rank's slot as bytes.
        descriptors: The shared arrays of the ranks.
        tuning: Which ways to carry out calls are the fastest.
        distance: How far the ranks' processors are apart; None if that is not measured.
        lent: What peers write into, and the words of the steps between which they do; None for nothing.
    """

    distance: CacheDistance | None = None

    def __init__(self, backend: Backend, segment: Segment) -> None:
        options = backend.options
        assert isinstance(options.bells, SocketDoorbells)
        bells, peers, ranks = options.bells, options.peers, options.ranks
        members = PeerSet(
            ended=lambda rank: peers.ended(ranks[rank]),
            how_ended=lambda rank: peers.how_ended(ranks[rank]),
            ring=lambda rank, number: bells.ring(peers.card(ranks[rank]).bells, number),
            describe=options.describe,
            number=options.number,
            ranks=options.ranks_in_messages,
        )
        self.backend = backend
        self._segment = segment
        self.region = SharedRegion(segment, backend.size)
        self.barrier = flag_barrier_class()(self.region, backend.rank, backend.size, members)
        self.barrier.line_of_earlier = options.line_of_earlier
        self.memories = [Memory(peers.card(rank).pid, options.describe(place)) for place, rank in enumerate(ranks)]
        self.single_copy = self.writes = self.compiled = False
        self.tuning = Tuning(Mode.OFF, None)
        self.table_bytes = [self.region.table_bytes(phase) for phase in (0, 1)]
        self.table_rows = [self.region.table_rows(phase) for phase in (0, 1)]
        byte, shape = np.dtype(np.uint8), (self.region.slots.slot_bytes,)
        self.byte_slots = [
            [self.region.slots.slot(phase, rank, byte, shape) for rank in range(backend.size)] for phase in (0, 1)
        ]
        self._areas: dict[tuple[np.dtype[Any], int], list[list[list[Array]]]] = {}
        self._scratch: Array | None = None
        # Of the small slots, `early_return` reserves all.
        self._reserved = {self.region.small_slots: self.region.small_slots.slot_bytes}
        self.lent: tuple[Any, int, int] | None = None
        self.descriptors = SharedDescriptors(options, self.region, shared_memory(options))

    def wait_for_all(self) -> Iterator[Waitable]:
        """Take the first steps with the other ranks, and find out what all can do with each other's memory."""
        rank, words, line = self.backend.rank, self.region.words, self.region.line
        allow_peers(self.backend.options)
        token = np.array([os.getpid() ^ id(self)])
        words[line(rank, TOKEN)], words[line(rank, TRIAL)] = address_of(token), address_of(_TRIAL)
        words[line(rank, TUNING)] = tuning_mode()
        self.region.set_cores(rank, cores())
        # The token itself is in the table, to be compared with what is read.
        self.region.table(0, rank)[rank, 0] = token[0]
        yield self._arrive()
        ranks = range(self.backend.size)
        can_read = may_copy() and all(map(self._can_read, ranks))
        can_write = can_read and all(map(self._can_write, ranks))
        has_cores = max(self.backend.size, local_world_size()) <= len(cores())
        words[line(rank, ABILITIES)] = (
            _READS * can_read | _WRITES * can_write | _COMPILED * (core.module is not None) | _HAS_CORES * has_cores
        )
        yield self._arrive()
        shared = reduce(and_, (words[line(peer, ABILITIES)] for peer in ranks))
        self.single_copy, self.writes = bool(shared & _READS), bool(shared & _WRITES)
        self.compiled = bool(shared & _COMPILED)
        cache = TuningCache(self.backend.size) if rank == 0 else None
        mode = Mode(min(words[line(peer, TUNING)] for peer in ranks))
        has_cores = bool(shared & _HAS_CORES) or self.region.have_own_cores()
        self.tuning = Tuning(mode, cache, has_cores=has_cores)
        if self.compiled and mode >= Mode.ON:  # else plans need no trials, and some count no calls
            self.distance = CacheDistance(self.region, rank, self.backend.size)
        if not has_cores:
            if self.compiled:
                spread_ranks(self.backend.options)
            self.barrier.fewest_spins = 1
            self.barrier.most_early_bytes = self.region.early_slots.slot_bytes
        self.region.seal()
        self._warn_of_limits()

    def _warn_of_limits(self) -> None:
        first_time = self.backend.options.peers.first_time
        if may_copy() and not self.single_copy and first_time("single copy"):
            _log.warning(
                "some ranks of a group cannot read each other's memory (process_vm_readv): long messages are copied"
                " twice"
            )
        if self.single_copy and not self.writes and first_time("writing"):
            _log.warning(
                "some ranks of a group cannot write each other's memory (process_vm_writev): the receiver of a long"
                " message copies it alone"
            )
        if not self._segment.is_anonymous and first_time("memfd"):
            _log.warning("memfd_create is missing or refused: shared memory is in /dev/shm, which may be small")

    def streams(self, call: Call) -> bool:
        """Return whether the arrays of a call, on all ranks, are more than half of the caches.

        Each rank may decide alone. What is copied into them then need not be left in the caches, which others use too:
        between 2 ranks, all-gathers of 8 MiB took 0.6 of the time, with arrays of three quarters of the cache, and
        gathers of 16 MiB 0.85. From a quarter on, some calls gained as much, and others took a tenth longer.
        """
        sides = [each(call.send)] if call.send is call.recv else [each(call.send), each(call.recv)]
        sizes = [array.nbytes for side in sides for array in side]
        if call.root is None or not sizes:
            num_bytes: int = sum(sizes)
        else:  # this rank has one block, or is the root and has those of all as well
            num_bytes = len(sides) * min(sizes)
        return 2 * self.backend.size * num_bytes > cache_bytes() > 0

    def reserve(self, num_bytes: int, slots: Slots | None = None) -> int:
        """Reserve so many bytes in each of this rank's slots, or of other `slots` of its; return how many it has.

        More than needed is reserved, since calls may grow a little each time.
        """
        slots = slots or self.region.slots
        if num_bytes > self._reserved.get(slots, 0):
            with_room = min(slots.slot_bytes, 1 << (num_bytes - 1).bit_length())
            try:
                self.region.reserve_slots(slots, self.backend.rank, with_room)
            except DistBackendError:
                self.region.reserve_slots(slots, self.backend.rank, num_bytes)
                with_room = num_bytes
            self._reserved[slots] = with_room
        return self._reserved.get(slots, 0)

    def begin_exposure(self, blocks: Blocks, begin: int, end: int) -> None:
        """Record what peers write into from the step of the word `begin` to that of `end`."""
        self.lent = blocks, begin, end

    def end_exposure(self) -> None:
        self.lent = None

    def wait_for_writers(self) -> None:
        """After this rank has recorded its failure: wait until no peer writes into its arrays any more."""
        if self.lent is None:
            return
        (blocks, begin, end), self.lent = self.lent, None
        # If some rank had not arrived, no peer writes, and none will: this rank's own signal is taken back.
        if self.barrier.arrived(begin):
            await_writers(lambda: not self.barrier.underway(end), each(blocks))

    def scratch(self, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Return private memory for two pieces of data."""
        if self._scratch is None:
            self._scratch = np.empty(2 * SCRATCH_BYTES, np.uint8)
        return self._scratch[:SCRATCH_BYTES].view(dtype), self._scratch[SCRATCH_BYTES:].view(dtype)

    def areas(self, dtype: np.dtype[Any], count: int) -> list[list[list[Array]]]:
        areas = self._areas.get((dtype, count))
        if areas is None:
            ranks, area_bytes = range(self.backend.size), count * dtype.itemsize
            areas = self._areas[dtype, count] = [
                [
                    [self.region.slots.slot(phase, rank, dtype, (count,), area_bytes * area) for area in ranks]
                    for rank in ranks
                ]
                for phase in (0, 1)
            ]
        return areas

    def _can_read(self, peer: int) -> bool:
        token = np.zeros(1, np.int64)
        address = self.region.words[self.region.line(peer, TOKEN)]
        return self.memories[peer].try_read(address, token) and bool(token[0] == self.region.table(0, peer)[peer, 0])

    def _can_write(self, peer: int) -> bool:
        return self.memories[peer].try_write(self.region.words[self.region.line(peer, TRIAL)], _TRIAL)

    def _arrive(self) -> Waitable:
        return SetupBarrierWait(self.backend.options, self.barrier, self.barrier.signal(SET_UP.fingerprint))


class SetupBarrierWait(BarrierWait):
    """A step of the setup; a rank that never arrives may have no memory yet to record that in."""

    def __init__(self, options: BackendOptions, barrier: FlagBarrier, word: int) -> None:
        super().__init__(barrier, word, SET_UP)
        self._options = options

    def check(self) -> None:
        self._barrier.check_states(SET_UP)
        for rank in self._barrier.absent(self.word):
            check_withdrawn(self._options, rank, LeftOut.CALL)
        super().check()


def shared_segment(backend: Backend) -> Generator[Waitable, None, Segment]:
    options, num_bytes = backend.options, SharedRegion.num_bytes(backend.size)
    if backend.rank == 0:
        cards = options.peers.cards(options.ranks)
        segment = create(num_bytes, [card.pid for card in cards])
        publish(options, _KEY, segment.place, list(range(1, backend.size)))
        return segment
    others = [rank for rank in range(backend.size) if rank != backend.rank]
    # Rank 0 may wait for this one in a message, while another has failed.
    place = Published(options, _KEY, 0, LeftOut.CALL, needed=others)
    yield place
    assert place.value is not None
    try:
        return find(place.value, num_bytes)
    except DistBackendError as error:
        # Rank 0 may have given up meanwhile, or left, because of another rank, which is the one to report.
        check_why_removed(options, others, LeftOut.CALL, error)
        raise
