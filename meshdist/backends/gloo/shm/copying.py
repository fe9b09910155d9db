"""Bases of the plans that copy out of and into the peers' memory."""

from __future__ import annotations

from collections.abc import Callable

from meshdist.arrays.host import Array
from meshdist.backends.gloo.shm.flag_barrier import BarrierPlan
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.backends.gloo.shm.single_copy import address_of
from meshdist.collectives.dataflow import Blocks
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Call, Signature

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
        phase = self.barrier.flip()
        table = self.shm.region.table(phase, self.rank)
        for peer, (given, taken) in enumerate(zip(give, take, strict=True)):
            table[peer] = *_place(given), *reversed(_place(taken))
        return phase

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


def refuse(shm: ShmGroup, signature: Signature, peer: int, verb: str, error_number: int) -> None:
    """Raise: the memory of a rank cannot be read or written. One that gives up records why before it frees its arrays."""
    shm.barrier.check_now(signature)
    raise shm.memories[peer].refused(verb, error_number)


def _place(block: Array | None) -> tuple[int, int]:
    return (0, 0) if block is None else (address_of(block), block.nbytes)
