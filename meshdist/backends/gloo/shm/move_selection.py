"""Data movement: which plan carries out a TransferSpec, and that of calls whose sizes no rank knows alone.

Few bytes go through the slots in one step, more in chunks. If ranks can read and write each other's memory, still more
goes in one copy straight from the sender's array into the receiver's, where trials do not find chunks faster: the ranks
write the addresses of their blocks into the table, step, copy, and step again before they may change their arrays.
Shared arrays are copied without the kernel: see zero_copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.backends.base import Plain, Plan
from meshdist.backends.gloo.shm.barrier_plans import (
    BarrierPlan,
    NextCalls,
    Sizes,
    StepCopies,
)
from meshdist.backends.gloo.shm.copying import announce
from meshdist.backends.gloo.shm.flag_barrier import BarrierWait
from meshdist.backends.gloo.shm.move_plans import ChunkedMove, SingleCopyMove, SlotMove, copies_of, keeping_own, put
from meshdist.backends.gloo.shm.shared_region import LARGE_GROUPS_SLOT
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.backends.gloo.shm.tuned_plan import ONE_STEP, Moment, TunedPlan, Ways, chunks_of, fastest
from meshdist.backends.gloo.shm.tuning import LEAST_IN_CHUNKS, TUNED_BYTES
from meshdist.backends.gloo.shm.zero_copy import SharedMove
from meshdist.collectives.dataflow import TransferSpec, givers_to
from meshdist.collectives.definition import definition_of
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Buffers, Call, Signature, each
from meshdist.runtime.call_mismatch import compare_splits

if TYPE_CHECKING:
    from meshdist.core import Chunks, SingleCopy, Step

# From so many bytes on, the core copies them once rather than twice through the slots; more where ranks share cores, to
# whom a second step is dear. Measured on 2 and 4 ranks, on 2 cores of an Intel Xeon: an all-gather of 64 KiB took 6 us
# instead of 15, an all-to-all of 1 MiB 300 instead of 500. But on an AMD EPYC, in small groups with a core for each
# rank, going through the slots took 0.45 to 0.6 of the time for 64 KiB, and 0.55 to 0.85 for 1 MiB; for a gather of
# 16 MiB, twice as long.
_READ_BYTES, _READ_BYTES_IN_SMALL_GROUPS, _READ_BYTES_ON_SHARED_CORES = TUNED_BYTES, 2 << 20, 256 << 10
# Where ranks share cores, though, a block for all goes through the slots, whose readers take it out of the cache one
# after another. Large groups are left out: their slots are short, and their chunks many steps. On 4 ranks, on 2 cores
# of an AMD EPYC, all-gathers of 1 to 64 MiB took 0.65 to 0.75 of the time so, broadcasts of 4 to 64 MiB 0.8. Exchanges
# took 0.6 to 1.0 of it in one state of the machine, and up to twice as long where the cores have no common cache, in
# which reading is never bad.
# Without the core, the longest block that moves through the slots although the kernel could copy it. While the slots
# stay in the cache, two copies by the processor take less time than finding the block's pages, and the ranks copy in
# the next chunk while others copy out the last. Measured on 2 and 4 ranks, on 2 cores.
CHUNKED_BYTES = 16 << 20
# The same for a block for each rank, from all ranks and from one, times the cube of the number of ranks: all of them
# share the slots, and here the cores.
CHUNKED_BYTES_OF_ALL, CHUNKED_BYTES_OF_ONE = 64 << 20, 8 << 20
# The same for blocks that each rank writes into the receiver's memory: all work at once, as through the slots.
CHUNKED_BYTES_WRITTEN = 2 << 20
# A chunk is a whole slot, up to 1 MiB: it is read from the common cache, and not from that of the core that wrote it.
# Broadcasts, exchanges and scatters of 1 to 16 MiB took 0.5 to 0.9 of the time that they took in chunks of this size,
# all-gathers 0.7 to 1.15. The short chunk is tried as well.
_SHORT_CHUNK = 256 << 10

# The most that a rank puts into its slot while the ranks compare their sizes, if they can copy the blocks instead; and
# where they share cores.
_WITH_SIZES, _WITH_SIZES_ON_SHARED_CORES = 32 << 10, 64 << 10
# In groups of so many ranks at most, the core looks for itself what there is to take, in the table of all sizes.
_MOST_SPLITS = 16

READ, WRITTEN = "read by the receiver", "written by the sender"
READ_OUTPUTS = "read by the receiver from the sender's output"
# NumPy requests large pages for arrays from this size on, which the kernel finds faster. All-gathers of 4 MiB between 2
# ranks took half of the time if what was read was what its sender had kept in its output; and 1.7 times as long where
# the ranks have no common cache, as each call writes there what others then fetch.
_LARGE_PAGES_BYTES = 4 << 20
# What stands for the sizes of all blocks, in a word with the number of a way.
_DIGEST_BYTES = 6
# The longest block of an array with strides that moves through the slots: its rows are copied there, and from there,
# instead of being packed.
_MOST_STRIDED = 8 << 20


def plan_movement(shm: ShmGroup, call: Call, spec: TransferSpec) -> Plan:
    if spec.longest is None:
        return AgreedMove(shm, call, spec)
    num_bytes, ways = moved_bytes(shm, spec, spec.longest), ways_to_move(shm, spec, spec.longest)
    if shm.single_copy and _has_larger_pages_in_outputs(call, spec, spec.longest):
        ways = {**ways, READ_OUTPUTS: partial(SingleCopyMove, reads_outputs=True)}
    if spec.given_bytes is not None and max(spec.given_bytes) <= shm.region.slots.slot_bytes:
        early = shm.barrier.early_return(givers_to(call, spec.giver, spec.taker), max(spec.given_bytes))
        # Fewer bytes have no trials.
        most_alike = min(TUNED_BYTES // 2, shm.region.slots.slot_bytes) if shm.compiled else 0
        one_step: Ways[TransferSpec] = {ONE_STEP: partial(SlotMove, early=early, most_alike=most_alike)}
        if num_bytes < LEAST_IN_CHUNKS:
            ways = {READ: ways[READ]} if shm.single_copy else {}
        is_read = shm.single_copy and not moves_through_slots(shm, spec, spec.longest)
        return fastest(shm, call, spec, num_bytes, {**ways, **one_step} if is_read else {**one_step, **ways})
    return SharedMove(shm, call, spec, fastest(shm, call, spec, num_bytes, ways))


def ways_to_move(shm: ShmGroup, spec: TransferSpec, longest: int) -> Ways[TransferSpec]:
    """Return the ways to move long blocks, beginning with the default."""
    slot_bytes = shm.region.slots.slot_bytes
    chunks = dict.fromkeys((slot_bytes, min(slot_bytes, _SHORT_CHUNK)))
    in_chunks = {chunks_of(size): partial(ChunkedMove, chunk_bytes=size) for size in chunks}
    if not shm.single_copy:
        return in_chunks
    shares = dict.fromkeys((spec.written, 0, 1) if shm.writes else (0,))
    in_one_copy = {_in_words(share): partial(SingleCopyMove, written=share) for share in shares}
    if moves_through_slots(shm, spec, longest):
        return {**in_chunks, **in_one_copy}
    return {**in_one_copy, **in_chunks}


def _has_larger_pages_in_outputs(call: Call, spec: TransferSpec, longest: int) -> bool:
    """Return whether NumPy requests large pages only for the outputs of all ranks, each an array of all blocks."""
    if not spec.shared or spec.giver is not None or spec.taker is not None or not isinstance(call.recv, np.ndarray):
        return False
    return longest < _LARGE_PAGES_BYTES <= call.recv.nbytes


def moved_bytes(shm: ShmGroup, spec: TransferSpec, longest: int) -> int:
    return longest if spec.shared else longest * shm.backend.size


def _in_words(written: float) -> str:
    if written in (0, 1):
        return WRITTEN if written else READ
    return f"{written:.0%} written by the sender, the rest read by the receiver"


def moves_through_slots(shm: ShmGroup, spec: TransferSpec, longest: int) -> bool:
    """Return whether blocks are guessed to be faster through the slots than in single copies."""
    if shm.compiled:
        num_bytes = moved_bytes(shm, spec, longest)
        slot_bytes = shm.region.slots.slot_bytes
        if shm.tuning.has_cores:
            return num_bytes < (_READ_BYTES_IN_SMALL_GROUPS if slot_bytes > LARGE_GROUPS_SLOT else _READ_BYTES)
        is_for_all = spec.shared and spec.taker is None
        if slot_bytes >= LARGE_GROUPS_SLOT and is_for_all:
            return True
        is_broadcast = spec.shared and spec.giver is not None
        return num_bytes < (slot_bytes + 1 if is_broadcast else _READ_BYTES_ON_SHARED_CORES)
    if spec.shared:
        return longest <= (CHUNKED_BYTES_WRITTEN if spec.written == 1 and shm.writes else CHUNKED_BYTES)
    return longest * shm.backend.size**3 <= (CHUNKED_BYTES_OF_ALL if spec.giver is None else CHUNKED_BYTES_OF_ONE)


class AgreedMove(BarrierPlan):
    """An exchange whose sizes no rank knows alone.

    In the first step each rank puts the sizes of its blocks into the table and, if they are short, the blocks into its
    slot. All ranks read all sizes: all raise if two ranks disagree, and all see whether the blocks of every rank were
    short. If not, the blocks move like long ones. A rank that does not know them to be short announces its blocks as
    well: if all have, and reading is the way to move them, they are read after this step.
    """

    def __init__(self, shm: ShmGroup, call: Call, spec: TransferSpec) -> None:
        super().__init__(shm.barrier, shm.backend, call)
        give, take = spec.give(call.send), spec.take(call.recv)
        assert all(block is not None for block in (*give, *take))
        self._shm, self._spec, self._rank = shm, spec, call.rank
        copied = _WITH_SIZES if shm.tuning.has_cores else _WITH_SIZES_ON_SHARED_CORES
        self._limit = copied if shm.single_copy else shm.region.slots.slot_bytes
        self._call = call.without_buffers()
        self._long: _LongMoves | None = None  # until they are needed: there may be other sizes in each call
        self._dtype = give[0].dtype  # type: ignore[union-attr]
        # Arrays of a list are copied as they are: flattening them costs more than copying a few bytes.
        self._takes_list = isinstance(call.recv, list)
        # Of the arrays whose rows are split; 0 for lists.
        self._row_bytes = 0
        if isinstance(call.send, np.ndarray):
            self._row_bytes = math.prod(call.send.shape[1:]) * call.send.itemsize
        self._shapes = [block.shape for block in (call.recv if isinstance(call.recv, list) else take)]  # type: ignore[union-attr]
        given, taken = [[block.nbytes for block in blocks] for blocks in (give, take)]  # type: ignore[union-attr]
        self._sizes = np.array([[0, to, come, 0] for to, come in zip(given, taken, strict=True)], np.int64)
        self._puts: list[Any] | None = None
        if sum(given) <= self._limit:
            shm.reserve(sum(given))
            self._puts = [spec.puts(shm.region.slots, phase) for phase in (0, 1)]
        # For each phase, all rows of the table; the sizes in it when they were last compared, and the places of short
        # blocks then.
        shape = call.size, call.size, -1
        self._tables = [np.frombuffer(table, np.int64).reshape(shape) for table in shm.table_bytes]
        self._agreed = b""
        self._takes: list[list[Array]] | None = None
        self._step: Step | None = None
        self._has_step = False  # or has tried to make one
        self._chunks: dict[tuple[str, bool], Chunks | None] = {}
        self._strided: str | None = None  # the way of strided arrays; None if they are packed

    def adopt_signature(self, signature: Signature) -> None:
        super().adopt_signature(signature)
        if self._long is not None:
            self._long.adopt_signature(signature)
        self._step, self._has_step, self._chunks = None, False, {}

    def _moves(self, send: Buffers, recv: Buffers) -> _LongMoves:
        """Return what moves long blocks, or those of shared arrays; of such arrays."""
        if self._long is None:
            call = self._call._replace(send=send, recv=recv).on_plain_arrays()
            self._long = _LongMoves(self._shm, call, self._spec)
            self._long.adopt_signature(self.signature)
        return self._long

    @property
    def runner(self) -> Callable[[Any, Any], object]:
        if self._step is not None:
            return self._step
        return self._run_until_short if core.module is None else core.Chosen(self, self._run_until_short)

    @property
    def template(self) -> Step | None:
        if self._takes is None or not self._row_bytes or self.backend.size > _MOST_SPLITS or not self._shm.compiled:
            return None
        step = self._compile()
        try:
            reserved = self._shm.reserve(min(self._limit, _WITH_SIZES_ON_SHARED_CORES))
        except DistBackendError:  # there is no memory; the call itself is done
            return None
        if step is not None:
            begin, _, slot_bytes = self._shm.region.slots.extent
            slots = begin, begin + self._shm.region.slots.phase_bytes, slot_bytes
            most = min(self._limit, reserved)
            step.set_splits(self._rank, self.backend.size, self._row_bytes, self._limit, most, slots)
        return step

    def go_on_with(
        self, rows_from: tuple[int, ...] | None, rows_to: tuple[int, ...] | None, send: Array, recv: Array
    ) -> None:
        """Go on after the first step of a call like this one, with other numbers of rows; None for equal numbers."""
        size = self.backend.size
        splits = rows_to or (len(send) // size,) * size, rows_from or (len(recv) // size,) * size
        call = self._call._replace(send=send, recv=recv, splits=splits).on_plain_arrays()
        dataflow = definition_of(call.collective).dataflow
        assert dataflow.spec is not None
        spec = dataflow.spec(call)
        assert isinstance(spec, TransferSpec)
        plan = AgreedMove(self._shm, call, spec)
        plan.adopt_signature(self.signature)
        plan.go_on(send, recv)

    def _compile(self) -> Step | None:
        if not self._has_step:
            self._step, self._has_step = self.compiled(self._step_copies()), True
        return self._step

    def _run_until_short(self, send: Buffers, recv: Buffers) -> bool:
        """Carry out a call; return whether the blocks of all ranks are short, so that the next one is a step."""
        self.run(send, recv)
        return self._step is not None

    def go_on(self, send: Buffers, recv: Buffers) -> None:
        """Go on after the first step of a call: the sizes are not those agreed, or arrays of a rank are shared."""
        self._run_rest(send, recv, None, has_begun=True)

    def next_calls(self) -> NextCalls | None:
        if self._puts is not None or not self._agreed or self._long is None or self._long.tuned.goes_on:
            return None
        run = self._compiled_rest(self._long, self._long.tuned.way, is_strided=False)
        if run is None:
            return None
        found = self._long.tuned.while_chosen(NextCalls(run))
        return found._replace(shared=self._shm.descriptors.told_by(self.barrier))

    def run(self, send: Buffers, recv: Buffers) -> None:
        began = None if self._long is None else self._long.tuned.begins()
        begun = self._run_compiled(send, recv)
        if not begun:
            self._run_rest(send, recv, began, has_begun=begun is None)
        elif self._step is None and self._long is not None:
            self._long.tuned.conclude(began)

    def run_strided(self, send: Buffers, recv: Buffers, plain: Plain) -> None:
        is_strided = not all(array.flags.c_contiguous for array in (*each(send), *each(recv)))
        begun = self._run_compiled(send, recv, is_strided=True) if is_strided else False
        if begun:
            return
        with plain() as (sent, received):
            if begun is False:
                self.run(sent, received)
            else:
                self._run_rest(sent, received, None, has_begun=True)

    def _run_compiled(self, send: Buffers, recv: Buffers, *, is_strided: bool = False) -> bool | None:
        """Carry out a call in the core. Return False if nothing was done, and None if only the first step was."""
        step = None if self._takes is None else self._compile()
        if step is not None:
            return step(send, recv)
        if self._takes is not None or self._long is None:
            return False
        way = self._strided if is_strided else self._long.tuned.way
        if way not in (None, READ):  # reading has a plan of its own
            self._long.tuned.plan_of(way, send, recv)
        rest = None if way is None else self._compiled_rest(self._long, way, is_strided=is_strided)
        if rest is None:
            return False
        self._offer(send, recv, self.barrier.phase ^ 1)
        begun = rest.begin(send, recv)
        if not begun:
            return begun
        if self._shm.descriptors.any_shared(self.barrier.phase):
            return None
        rest.finish(send, recv)
        return True

    def _run_rest(self, send: Buffers, recv: Buffers, began: Moment | None, *, has_begun: bool) -> None:
        if not has_begun:
            self._put(send, recv)
            self.barrier.await_others(self.barrier.signal(self.fingerprint), self)
        phase = self.barrier.phase
        if self._take(send, recv, phase):
            return
        moves = self._moves(send, recv)
        if self._is_read(moves, phase):
            self._take_steps(self._read(moves, send, recv, phase, began))
        else:
            moves.bulk.run(send, recv)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        began = None if self._long is None else self._long.tuned.begins()
        phase = self._put(send, recv)
        yield self.arrive()
        if self._take(send, recv, phase):
            return
        moves = self._moves(send, recv)
        if self._is_read(moves, phase):
            yield from self._read(moves, send, recv, phase, began)
        else:
            yield from moves.bulk.steps(send, recv)

    def _put(self, send: Buffers, recv: Buffers) -> int:
        if self._takes is None:
            phase = announce(self._shm, self._rank, self._spec.give(send), self._spec.take(recv))
        else:
            phase = self.barrier.flip()
            self._shm.table_rows[phase][self._rank][:] = self._sizes.data.cast("B")
        self._offer(send, recv, phase)
        return phase

    def _offer(self, send: Buffers, recv: Buffers, phase: int) -> None:
        descriptors = self._shm.descriptors
        if descriptors.heap.in_use or descriptors.flags[phase]:
            self._moves(send, recv).bulk.set_flag(send, recv, phase)
        if self._puts is not None:
            put(send, self._puts[phase])

    def _take(self, send: Buffers, recv: Buffers, phase: int) -> bool:
        """Take the blocks out of the slots; return whether they are there."""
        if self._tables[phase][:, :, 1:3].tobytes() != self._agreed:
            self._compare(send, recv, phase)
        if self._takes is None:
            return False
        given: Any = send if isinstance(send, list) else self._spec.give(send)
        blocks: Any = recv if isinstance(recv, list) else self._spec.take(recv)
        for peer, place in enumerate(self._takes[phase]):
            # The core does not put into the slot what the rank keeps.
            blocks[peer][...] = given[peer].reshape(place.shape) if peer == self._rank else place
        return True

    def _is_read(self, moves: _LongMoves, phase: int) -> bool:
        """Return whether the blocks are read now: all ranks see the same table, and go the same way."""
        addresses, num_bytes = self._tables[phase][:, :, 0], self._tables[phase][:, :, 1]
        return moves.tuned.way == READ and not ((addresses <= 0) & (num_bytes != 0)).any()

    def _compiled_rest(self, moves: _LongMoves, way: str, *, is_strided: bool) -> Chunks | SingleCopy | None:
        if way == READ:
            return moves.reading.compiled_copy()
        return self._compiled_chunks(moves, way, is_strided=is_strided)

    def _compiled_chunks(self, moves: _LongMoves, way: str, *, is_strided: bool) -> Chunks | None:
        """Return what moves the blocks in chunks, of which the first goes with the sizes; None if that is not the way.

        In the place of addresses, the table has a number for the way and for the sizes that this rank has agreed to. So
        all ranks see whether all have chosen the same way for the same sizes: those of one rank may be as they were
        when others have got other ones. Ranks may have other ways, since the arrays of some are strided: these are not
        part of the trials, and so have numbers of their own. A rank whose blocks may be short has them in its slot.
        """
        key = way, is_strided
        if key not in self._chunks:
            move, chunks = moves.by_way.get(way), None
            if self._puts is None and self._agreed and isinstance(move, ChunkedMove):
                agreed = np.frombuffer(self._agreed, np.int64).reshape(self.backend.size, self.backend.size, 2)
                table = _without_addresses(agreed)
                own = self._sizes.copy()
                sizes = int.from_bytes(blake2b(self._agreed, digest_size=_DIGEST_BYTES).digest(), "little")
                chosen = sizes * len(moves.ways) + list(moves.ways).index(way)
                table[:, :, 0] = own[:, 0] = -1 - 2 * chosen - is_strided
                chunks = move.compiled_chunks(Sizes(own, self._tables, self._rank, table.tobytes()))
            self._chunks[key] = chunks
        return self._chunks[key]

    def _read(
        self, moves: _LongMoves, send: Buffers, recv: Buffers, phase: int, began: Moment | None
    ) -> Iterator[BarrierWait]:
        if self._shm.descriptors.any_shared(phase):
            yield from moves.bulk.after_first_step(send, recv, phase)
        else:
            began = began or moves.tuned.begins()  # of a plan that was made in this call
            yield from moves.reading.copy(self._spec.give(send), self._spec.take(recv), phase)
            if moves.tuned.ended(began):
                yield from moves.tuned.compare()

    def _compare(self, send: Buffers, recv: Buffers, phase: int) -> None:
        sizes = self._tables[phase][:, :, 1:3].copy()
        given, expected = sizes[:, :, 0], sizes[:, :, 1]
        row_bytes = self._spec.row_bytes
        compare_splits(given // row_bytes, expected // row_bytes, self._spec.unit, self.backend.options.ranks)
        self._agreed = sizes.tobytes()
        self._takes = self._step = None
        self._has_step, self._chunks = False, {}
        if given.sum(axis=1).max() <= self._limit:
            begins = given[:, : self._rank].sum(axis=1).tolist()
            self._takes = [self._places(k, begins) for k in (0, 1)]
        else:
            longest = int(given.max())
            names = self._moves(send, recv).over(longest, self._agreed)
            self._strided = next(names, None) if longest <= _MOST_STRIDED else None

    def _step_copies(self) -> StepCopies:
        assert self._puts is not None
        assert self._takes is not None
        copies = StepCopies(
            keeps=(self._puts, self._takes),
            num_sent=len(each(self._puts[0])),
            num_received=len(self._takes[0]) if self._takes_list else 1,
            puts=[*map(copies_of, self._puts)],
            takes=[copies_of(places, one_after_another=not self._takes_list) for places in self._takes],
        )
        agreed = np.frombuffer(self._agreed, np.int64).reshape(self.backend.size, self.backend.size, 2)
        table = _without_addresses(agreed).tobytes()
        return Sizes(self._sizes, self._tables, self._rank, table).compared(keeping_own(copies, others_take_it=False))

    def _places(self, phase: int, begins: Sequence[int]) -> list[Array]:
        slot, blocks = self._shm.region.slots.slot, zip(self._shapes, begins, strict=True)
        return [slot(phase, peer, self._dtype, shape, begin) for peer, (shape, begin) in enumerate(blocks)]


class _LongMoves:
    """What moves the blocks of an exchange whose sizes no rank knows alone, if they are long.

    Attributes:
        ways: What makes the plan of each way, by its name.
        by_way: Those that have been made.
        tuned: The one that runs the fastest of them.
        bulk: Moves the blocks of shared arrays, and others by `tuned`.
        reading: Apart from the one in `by_way`, whose first step is its own.
    """

    def __init__(self, shm: ShmGroup, call: Call, spec: TransferSpec) -> None:
        self._shm, self._spec, self._longest = shm, spec, 0
        self.ways = ways_to_move(shm, spec, 0)
        self.by_way: dict[str, BarrierPlan] = {}
        self.tuned = TunedPlan(shm, call, self.by_way, self._make)
        self.bulk = SharedMove(shm, call, spec, self.tuned)
        self.reading = SingleCopyMove(shm, call, spec, written=0)

    def adopt_signature(self, signature: Signature) -> None:
        self.bulk.adopt_signature(signature)
        self.reading.adopt_signature(signature)

    def over(self, longest: int, agreed: bytes) -> Iterator[str]:
        """The longest block is of so many bytes, and all sizes are those agreed; return the ways in chunks."""
        self._longest = longest
        for move in self.by_way.values():
            if isinstance(move, ChunkedMove):
                move.longest = longest
                move.recompile()
        names = list(ways_to_move(self._shm, self._spec, longest))
        self.tuned.over(moved_bytes(self._shm, self._spec, longest), names)
        self.reading.agree(agreed)
        return (name for name in names if getattr(self.ways[name], "func", None) is ChunkedMove)

    def _make(self, way: str, call: Call) -> BarrierPlan:
        move = self.ways[way](self._shm, call, self._spec)
        if isinstance(move, ChunkedMove):
            move.longest = self._longest
        return move


def _without_addresses(sizes: Array) -> Array:
    """Return a table with the sizes of all blocks, and no addresses."""
    table = np.zeros((*sizes.shape[:2], 4), np.int64)
    table[:, :, 1:3] = sizes
    return table
