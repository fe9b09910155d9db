"""Plans that read or write the peers' memory: what the ranks tell each other first, and the copies themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdist.arrays import Array
from meshdist.backends.gloo.lockstep import LockstepPlan
from meshdist.backends.gloo.routes import Blocks
from meshdist.backends.gloo.single_copy import address_of
from meshdist.call import Call
from meshdist.errors import DistBackendError

if TYPE_CHECKING:
    from meshdist.backends.gloo.host import Host

# What is written without a look whether all ranks are still at it.
_PIECE = 4 << 20


class CopyingPlan(LockstepPlan):
    """A plan in which ranks can copy out of and into each other's memory.

    Attributes:
        host: The group's shared memory.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, host: Host, call: Call) -> None:
        super().__init__(host.lockstep, host.backend, call)
        self.host = host
        self.rank = call.rank
        self.size = call.size

    def others(self) -> list[int]:
        """Return the other ranks, beginning with the next, so that not all turn to one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def announce(self, give: Blocks, take: Blocks) -> int:
        """Write into the table where this rank's blocks are and how long; return which of the two tables."""
        use = self.lockstep.flip()
        table = self.host.arena.table(use, self.rank)
        for peer, (given, taken) in enumerate(zip(give, take, strict=True)):
            table[peer] = *_place(given), *reversed(_place(taken))
        return use

    def read(self, peer: int, address: int, into: Array) -> None:
        """Read a peer's memory."""
        self._copy(self.host.memories[peer].read, address, into)

    def write(self, peer: int, address: int, data: Array) -> None:
        """Write bytes into a peer's memory."""
        for begin in range(0, data.nbytes, _PIECE):
            # Not where it has given up since all ranks met: its arrays are its user's again, or other memory.
            self.lockstep.check_now(self.signature)
            self._copy(self.host.memories[peer].write, address + begin, data[begin : begin + _PIECE])

    def _copy(self, copy: Callable[[int, Array], None], address: int, array: Array) -> None:
        try:
            copy(address, array)
        except DistBackendError:
            # A rank that has given up has said why, before its arrays went.
            self.lockstep.check_now(self.signature)
            raise


def _place(block: Array | None) -> tuple[int, int]:
    return (0, 0) if block is None else (address_of(block), block.nbytes)
