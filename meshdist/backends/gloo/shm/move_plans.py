"""The plans of data movement: in one step through the slots, in a single copy, and in chunks through the slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.gloo.shm.barrier_plans import InChunks, OneStep, Run, SlotCopy, StepCopies, chunks_of_blocks
from meshdist.backends.gloo.shm.copying import CopyingPlan, SingleCopyPlan, kept_of, places_in
from meshdist.backends.gloo.shm.flag_barrier import BarrierWait, EarlyReturn
from meshdist.backends.gloo.shm.shared_region import LINE_BYTES, PAGE
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.backends.gloo.shm.single_copy import address_of
from meshdist.collectives.dataflow import Blocks, TransferSpec
from meshdist.runtime.call import Buffers, Call, each

_NOTHING = np.empty(0, np.uint8)


class SlotMove(OneStep):
    """Few bytes: through the slots in one step."""

    def __init__(
        self, shm: ShmGroup, call: Call, spec: TransferSpec, early: EarlyReturn | None = None, most_alike: int = 0
    ) -> None:
        super().__init__(shm.barrier, shm.backend, call, early)
        slots = shm.region.slots if early is None else early.slots
        given_bytes = spec.given_bytes or [0] * call.size
        own_bytes = given_bytes[call.rank]
        reserved = shm.reserve(own_bytes, slots)
        self.set_alike(call, max(given_bytes), most_alike, slots, reserved if own_bytes else slots.slot_bytes)
        self._puts = [spec.puts(slots, phase) for phase in self.phases]
        self._takes = [spec.takes(slots, phase) for phase in self.phases]
        self._is_shared = spec.shared

    def put(self, send: Any, phase: int) -> None:
        put(send, self._puts[phase])

    def take(self, recv: Any, phase: int) -> None:
        place = self._takes[phase]
        if type(place) is list:
            for peer, part in enumerate(place):
                recv[peer][...] = part
        elif place is not None:
            (recv if recv.shape == place.shape else recv.reshape(place.shape))[...] = place

    def step_copies(self) -> StepCopies:
        copies = StepCopies(
            keeps=(self._puts, self._takes),
            num_sent=len(each(self._puts[0])),
            num_received=len(each(self._takes[0])),
            puts=[*map(copies_of, self._puts[: self.num_listed])],
            takes=[*map(copies_of, self._takes[: self.num_listed])],
        )
        return keeping_own(copies, others_take_it=self._is_shared)


def keeping_own(copies: StepCopies, *, others_take_it: bool) -> StepCopies:
    """Return `copies` in which the rank does not take what is its own out of its slot.

    Unless `others_take_it`, it does not put that there either.
    """
    kept, of_others = [], []
    for number, take in enumerate(copies.takes[0]):
        put = next((put for put in copies.puts[0] if put.array >= 0 and _holds(put, take)), None)
        if put is None:
            of_others.append(number)
        elif take.num_bytes:
            kept.append((put.array, put.offset + take.address - put.address, take.array, take.offset, take.num_bytes))
    takes = [[takes[number] for number in of_others] for takes in copies.takes]
    if others_take_it:
        return copies._replace(takes=takes, kept=kept)
    puts = [[part for put in puts for part in _around(put, kept)] for puts in copies.puts]
    return copies._replace(puts=puts, takes=takes, kept=kept)


def _holds(put: SlotCopy, take: SlotCopy) -> bool:
    return put.address <= take.address and take.address + take.num_bytes <= put.address + put.num_bytes


def _around(put: SlotCopy, kept: Sequence[tuple[int, int, int, int, int]]) -> Iterator[SlotCopy]:
    """Yield the parts of a copy into the slot that are not of what is kept."""
    begin, end = put.offset, put.offset + put.num_bytes
    for array, at, _, _, num_bytes in sorted(kept):
        if array == put.array and begin <= at < end:
            yield SlotCopy(array, begin, at - begin, put.address + begin - put.offset)
            begin = at + num_bytes
    yield SlotCopy(put.array, begin, end - begin, put.address + begin - put.offset)


def copies_of(places: Any, *, one_after_another: bool = False) -> list[SlotCopy]:
    """Return the copies between the arrays of a call, or parts of one array, and their places in the slots.

    See `StepCopies`.
    """
    copies: list[SlotCopy] = []
    if one_after_another:
        for place, end in zip(places, accumulate(place.nbytes for place in places), strict=True):
            copies.append(SlotCopy(0, end - place.nbytes, place.nbytes, place.ctypes.data))
        return copies
    for which, place in enumerate(each(places)):
        # The rows of a stack are contiguous, each in the slot of another rank.
        offset = 0
        for row in (place,) if place.flags.c_contiguous else place:
            copies.append(SlotCopy(which, offset, row.nbytes, row.ctypes.data))
            offset += row.nbytes
    return copies


def put(send: Any, place: Any) -> None:
    if type(place) is list:
        for peer, part in enumerate(place):  # a strict zip is slower
            part[...] = send[peer]
    elif place is not None:
        place[...] = send


class SingleCopyMove(SingleCopyPlan):
    """Many bytes, one copy: read from the sender's array, or a share of it `written` into the receiver's."""

    def __init__(
        self, shm: ShmGroup, call: Call, spec: TransferSpec, written: float = 0, *, reads_outputs: bool = False
    ) -> None:
        super().__init__(shm, call, spec.give, spec.take, written, reads_outputs=reads_outputs)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        give, take = self.give(send), self.take(recv)
        phase = self.announce(give, take)
        self.expose(take)
        yield self.arrive()
        yield from self.copy(give, take, phase)

    def copy(self, give: Blocks, take: Blocks, phase: int) -> Iterator[BarrierWait]:
        """Go on after the step in which all have announced their blocks."""
        keep_own(give[self.rank], take[self.rank])
        if self.reads_outputs:
            yield self.arrive()
        for peer in self.others():
            table = self.shm.region.table(phase, peer)
            address, _, wanted, target = table[self.rank].tolist()
            given, taken = _bytes(give[peer]), _bytes(take[peer])
            self.read(peer, int(table[peer][3]) if self.reads_outputs else address, taken[: self._read(taken.size)])
            if wanted and self.written:
                begin = self._read(wanted)
                self.write(peer, target + begin, given[begin:wanted])
        yield self.arrive()
        self.shm.end_exposure()

    def _read(self, num_bytes: int) -> int:
        """Return how many bytes of a block its receiver reads: whole pages."""
        return int(num_bytes * (1 - self.written)) & -PAGE if self.written else num_bytes


class ChunkedMove(InChunks, CopyingPlan):
    """Many bytes through the slots: chunk by chunk, using the two slots in turn.

    Attributes:
        longest: The size of the longest block, in bytes.
    """

    def __init__(self, shm: ShmGroup, call: Call, spec: TransferSpec, chunk_bytes: int) -> None:
        super().__init__(shm, call)
        self.spec, self.longest = spec, spec.longest or 0
        # A shared block has the slot to itself; otherwise each rank has an area.
        share = chunk_bytes // call.size
        self.chunk_bytes = chunk_bytes if spec.shared else share & -LINE_BYTES or share
        self._places = places_in(call.send, spec.give(call.send)), places_in(call.recv, spec.take(call.recv))
        self._streams = shm.streams(call)
        shm.reserve(chunk_bytes)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        give, take = self.spec.give(send), self.spec.take(recv)
        keep_own(give[self.rank], take[self.rank])
        given, taken = [_bytes(block) for block in give], [_bytes(block) for block in take]
        shared, chunk = self.spec.shared, self.chunk_bytes
        for begin in range(0, self.longest, chunk):
            slots = self.shm.byte_slots[self.barrier.flip()]
            for peer in self.others()[:1] if shared else self.others():
                part = given[peer][begin : begin + chunk]
                area = 0 if shared else peer * chunk
                if part.size:
                    self.barrier.put(slots[self.rank][area : area + part.size], part)
            yield self.arrive()
            for peer in self.others():
                part = taken[peer][begin : begin + chunk]
                area = 0 if shared else self.rank * chunk
                part[...] = slots[peer][area : area + part.size]

    def runs(self) -> tuple[list[Run], tuple[int, int]] | None:
        (num_sent, gives), (num_received, takes) = self._places
        if gives is None or takes is None:
            return None
        shared, chunk, slots = self.spec.shared, self.chunk_bytes, self.shm.byte_slots
        bases = [[address_of(slot) for slot in slots[phase]] for phase in (0, 1)]
        rank, others, runs = self.rank, self.others(), []
        puts = [(gives[peer], 0 if shared else peer * chunk) for peer in (others[:1] if shared else others)]
        blocks = [*(place for place, _ in puts), *(takes[peer] for peer in others), takes[rank]]
        area = 0 if shared else rank * chunk
        for count, sizes in chunks_of_blocks([place.num_bytes for place in blocks], self.longest, chunk):
            given, taken = sizes[: len(puts)], sizes[len(puts) : -1]
            copies = StepCopies(
                keeps=slots,
                num_sent=num_sent,
                num_received=num_received,
                puts=[
                    [
                        place.copied(size, base[rank] + begin)
                        for (place, begin), size in zip(puts, given, strict=True)
                        if size
                    ]
                    for base in bases
                ],
                takes=[
                    [
                        takes[peer].copied(size, base[peer] + area)
                        for peer, size in zip(others, taken, strict=True)
                        if size
                    ]
                    for base in bases
                ],
                kept=kept_of(gives[rank], takes[rank], sizes[-1]),
                streams=self._streams,
            )
            runs.append(Run(copies, None, count))
        return runs, (num_sent, num_received)


def _bytes(block: Array | None) -> Array:
    return _NOTHING if block is None else block.view(np.uint8)


def keep_own(give: Array | None, take: Array | None) -> None:
    if give is not None and take is not None:
        take[...] = give
