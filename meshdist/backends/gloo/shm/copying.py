"""Bases of the plans that copy out of and into the peers' memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.backends.gloo.shm.barrier_plans import BarrierPlan, NextCalls, SlotCopy, await_rest
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.backends.gloo.shm.single_copy import address_of
from meshdist.collectives.dataflow import Blocks
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Buffers, Call, Signature, each

if TYPE_CHECKING:
    from meshdist.core import SingleCopy

# How much is written between two checks of whether all ranks still take part.
_PIECE = 4 << 20


class CopyingPlan(BarrierPlan):
    def __init__(self, shm: ShmGroup, call: Call) -> None:
        super().__init__(shm.barrier, shm.backend, call)
        self.shm = shm
        self.rank = call.rank
        self.size = call.size

    def others(self) -> list[int]:
        """Return the other ranks, beginning with the next, so that the ranks do not all access the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def announce(self, give: Blocks, take: Blocks) -> int:
        return announce(self.shm, self.rank, give, take)

    def read(self, peer: int, address: int, into: Array) -> None:
        self._copy(self.shm.memories[peer].read, address, into)

    def write(self, peer: int, address: int, data: Array) -> None:
        for begin in range(0, data.nbytes, _PIECE):
            # If the peer has given up since the last step, its arrays belong to its user again, or are freed.
            self.barrier.check_now(self.signature)
            self._copy(self.shm.memories[peer].write, address + begin, data[begin : begin + _PIECE])

    def _copy(self, copy: Callable[[int, Array], None], address: int, array: Array) -> None:
        try:
            copy(address, array)
        except DistBackendError:
            # A rank that gives up records why before it frees its arrays.
            self.barrier.check_now(self.signature)
            raise


def announce(shm: ShmGroup, rank: int, give: Blocks, take: Blocks) -> int:
    """Write the addresses and the sizes of a rank's blocks into the table, before a step; return its phase."""
    phase = shm.barrier.flip()
    table = shm.region.table(phase, rank)
    for peer, (given, taken) in enumerate(zip(give, take, strict=True)):
        table[peer] = *_place(given), *reversed(_place(taken))
    return phase


class Reduced(NamedTuple):
    """The reduction of what is read, for the core."""

    op: str
    kind: str  # what dtype it is of
    itemsize: int
    keeps: bool  # each rank keeps its finished segment for itself
    scratch: tuple[int, int]  # addresses of memory for a piece each
    piece_bytes: int


class SingleCopyPlan(CopyingPlan):
    """Base of the plans in which the ranks read each other's arrays, or write a share of them.

    All tell where their blocks are, step, copy, and step again before the arrays may change. The core does all of that,
    if it is there.

    Args:
        give, take: The blocks for each rank and from each rank, from what is sent and received.
        written: The share of a block that its sender writes.
        reads_outputs: What the receiver reads is the block that its sender keeps, in its place.
    """

    def __init__(
        self,
        shm: ShmGroup,
        call: Call,
        give: Callable[[Buffers], Blocks],
        take: Callable[[Buffers], Blocks],
        written: float = 0,
        *,
        reads_outputs: bool = False,
    ) -> None:
        super().__init__(shm, call)
        self.give, self.take, self.written, self.reads_outputs = give, take, written, reads_outputs
        # Where the blocks lie in the arrays of a call.
        self._places = places_in(call.send, give(call.send)), places_in(call.recv, take(call.recv))
        self._streams = shm.streams(call)
        self._agreed = b""
        self._compiled: SingleCopy | None = None
        self._is_compiled = False

    def adopt_signature(self, signature: Signature) -> None:
        super().adopt_signature(signature)
        self._compiled, self._is_compiled = None, False

    def agree(self, sizes: bytes) -> None:
        """Have the core compare the sizes in the table, which no rank knows alone, with these: two for each pair."""
        self._agreed, self._compiled, self._is_compiled = sizes, None, False

    def run(self, send: Buffers, recv: Buffers) -> None:
        copy = self.compiled_copy()
        if copy is None or not copy(send, recv):
            super().run(send, recv)

    def next_calls(self) -> NextCalls | None:
        copy = self.compiled_copy()
        return None if copy is None else NextCalls(copy)

    def first_step(self, send: Buffers, recv: Buffers) -> Callable[[], object]:
        copy = self.compiled_copy()
        if copy is None or not copy.begin(send, recv):
            return super().first_step(send, recv)
        return partial(copy.finish, send, recv)

    def reduced(self) -> Reduced | None:
        """Return the reduction of what is read; None if there is none."""
        return None

    def expose(self, take: Blocks) -> None:
        """Record that peers write into `take` between the next two steps, if they do."""
        if self.written:
            self.shm.begin_exposure(take, *(self.barrier.next_word(self.fingerprint, steps) for steps in (1, 2)))

    def compiled_copy(self) -> SingleCopy | None:
        """Return what carries out the call in the core; None if the core does not."""
        if self._is_compiled:
            return self._compiled
        self._is_compiled = True
        (num_sent, gives), (num_received, takes) = self._places
        if core.module is None or gives is None or takes is None:
            return None
        shm, signature = self.shm, self.signature
        self._compiled = core.SingleCopy(
            shm.barrier,
            self.fingerprint,
            # Not of this plan, which holds the result.
            partial(await_rest, self.backend, self.error_prefix, shm.barrier, signature),
            partial(shm.barrier.check_now, signature),
            partial(_refuse, shm, signature),
            shm,
            (self.rank, self.size),
            (num_sent, num_received),
            gives,
            takes,
            self.written,
            self._streams,
            self.reads_outputs,
            (shm.region.table(0, 0).ctypes.data, shm.region.table(1, 0).ctypes.data),
            [memory.pid for memory in shm.memories],
            self.reduced(),
            self._agreed,
        )
        return self._compiled


def _refuse(shm: ShmGroup, signature: Signature, peer: int, verb: str, error_number: int) -> None:
    """Raise: a rank's memory cannot be read or written. One that gives up records why before it frees its arrays."""
    shm.barrier.check_now(signature)
    raise shm.memories[peer].refused(verb, error_number)


class Place(NamedTuple):
    """Where a block lies in the arrays of a call."""

    array: int  # -1 for no block
    offset: int
    num_bytes: int

    def copied(self, num_bytes: int, address: int) -> SlotCopy:
        """Return the copy of so many of its bytes into a slot, or out of it."""
        return SlotCopy(self.array, self.offset, num_bytes, address)


def kept_of(give: Place, take: Place, num_bytes: int) -> list[tuple[int, int, int, int, int]]:
    """Return the copy of so many bytes of the block that a rank gives itself; see `StepCopies`."""
    return [(give.array, give.offset, take.array, take.offset, num_bytes)] if num_bytes and give.num_bytes else []


def places_in(buffers: Buffers, blocks: Blocks) -> tuple[int, list[Place] | None]:
    """Return how many arrays there are, and the place of each block in them; None if these are unknown.

    The blocks of a list are its arrays, each in its place: the same array may be there more than once, but need not be
    in the next call.
    """
    arrays = each(buffers)
    if not all(array.flags.c_contiguous for array in arrays):
        return len(arrays), None
    places = []
    for peer, block in enumerate(blocks):
        if block is None or not block.nbytes:
            places.append(Place(-1, 0, 0))
            continue
        which = peer if isinstance(buffers, list) else 0
        offset = address_of(block) - address_of(arrays[which])
        if not 0 <= offset <= arrays[which].nbytes - block.nbytes:
            return len(arrays), None
        places.append(Place(which, offset, block.nbytes))
    return len(arrays), places


def _place(block: Array | None) -> tuple[int, int]:
    return (0, 0) if block is None else (address_of(block), block.nbytes)
