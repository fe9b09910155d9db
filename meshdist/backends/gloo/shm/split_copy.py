"""Split copy: the receiver of a long message reads it from the beginning, its sender writes it from the end.

So two processors copy. If the sender is busy or not scheduled, the receiver reads all but the piece that the sender has
begun. If both ranks send each other such a message at once, each reads all of the other's: both processors copy anyway,
and do not get in each other's way.

Each side announces in the channel how far it is going, then reads the other's announcement, and keeps out of that: the
receiver announces what it is reading, and the address of its array (READING, ROOM), the sender from where on it is
writing and has written (CLAIMED, WRITTEN_FROM). With a fence in between, at least one of two sides that announce at the
same time sees the other's announcement: the argument of E. W. Dekker's mutual exclusion (in Dijkstra, "Cooperating
sequential processes", 1965). If both see each other, the sender gives way. So once the receiver has reached what the
sender has written, the sender writes no more, and the array is the user's again.
"""

from __future__ import annotations

from meshdist.arrays.host import Array
from meshdist.backends.gloo.shm.channel import CLAIMED, READING, ROOM, WRITTEN_FROM, Channel, Header
from meshdist.backends.gloo.shm.segment import fence
from meshdist.backends.gloo.shm.shared_region import PAGE
from meshdist.backends.gloo.shm.single_copy import Memory, address_of, may_copy
from meshdist.system.platform import let_others_run

# A side takes a third of what is left between the two at a time, so that both finish together; but no less than the
# shortest piece, and the receiver takes the last one.
_SHARE, _SHORTEST_PIECE = 3, 64 << 10
# What a receiver that reads all reads at a time: between two pieces it may be interrupted.
_LONGEST_PIECE = 8 << 20
# An announcement holds the number of its message, which begins at 1, and a place in the message; 0 is none.
_PLACE_BITS, _NUMBERS = 40, (1 << 24) - 1
_PLACE = (1 << _PLACE_BITS) - 1
# How often the receiver polls for the rest of the sender's piece, yielding.
_SPINS = 60


class _Part:
    def __init__(self, channel: Channel, memory: Memory, header: Header) -> None:
        self._words = channel.words
        self._memory = memory
        self._size = header.num_bytes
        self._number = header.number % _NUMBERS + 1 << _PLACE_BITS

    def _piece(self, between: int) -> int:
        return max(_SHORTEST_PIECE, between // _SHARE & -PAGE)

    def _announce(self, word: int, place: int) -> None:
        self._words[word] = self._number | place

    def _announced(self, word: int) -> int | None:
        """Return the announced place; None if the announcement is of another message."""
        said = self._words[word]
        return said & _PLACE if said & ~_PLACE == self._number else None


class SplitRead(_Part):
    """The receiver's side; `target` is its array as bytes, `memory` that of the sender; it may read `all_of_it`."""

    def __init__(
        self, channel: Channel, memory: Memory, header: Header, target: Array, *, all_of_it: bool = False
    ) -> None:
        super().__init__(channel, memory, header)
        self.target = target
        self._address = header.address
        self._there = 0
        self._has_all_to_itself = all_of_it
        self._words[ROOM] = address_of(target)
        self._claim(self._piece(self._size))

    def read_on(self) -> bool:
        """Read up to the sender's claim; return whether the sender has written all of that."""
        spins = _SPINS
        while spins:
            end = self._claimed()
            if self._there < end:
                piece = _LONGEST_PIECE if self._has_all_to_itself else self._piece(end - self._there)
                goal = self._there + piece
                self._claim(goal)
                end = min(goal, self._claimed())
                if self._there < end:
                    self._memory.read(self._address + self._there, self.target[self._there : end])
                    self._there = end
            elif self._has_all():
                return True
            else:
                spins -= 1
                let_others_run()
        return False

    def revoke(self) -> None:
        """Keep the sender from beginning another piece."""
        self._has_all_to_itself = True
        self._claim(self._size)

    def is_quiet(self) -> bool:
        return self._written_from() is not None

    def _has_all(self) -> bool:
        # What is read reaches what the sender has written, so the sender cannot claim more.
        begin = self._written_from()
        return begin is not None and self._there >= begin

    def _written_from(self) -> int | None:
        # From where on the sender has written; None while it is writing. Read each word once, in this order.
        written, claimed = self._announced(WRITTEN_FROM), self._announced(CLAIMED)
        if claimed is None:
            return self._size
        return claimed if claimed == written else None

    def _claim(self, end: int) -> None:
        self._announce(READING, self._size if self._has_all_to_itself else min(end, self._size))
        fence()

    def _claimed(self) -> int:
        claimed = self._announced(CLAIMED)
        return self._size if claimed is None else claimed


class SplitWrite(_Part):
    """The sender's side; `data` is the message as bytes, `memory` that of the receiver."""

    def __init__(self, channel: Channel, memory: Memory, header: Header, data: Array) -> None:
        super().__init__(channel, memory, header)
        self._data = data
        self._from = header.num_bytes
        self._may_write = may_copy()

    def write_piece(self) -> bool:
        """Write a piece that the receiver has not reached, if it has begun to read; return whether there was one."""
        reading = self._announced(READING)
        if reading is None or not self._may_write:
            return False
        begin = self._from - self._piece(self._from - reading)
        if reading > begin:
            return False
        room = self._words[ROOM]
        self._announce(CLAIMED, begin)
        try:
            fence()
            reading = self._announced(READING)
            if reading is not None and reading <= begin:
                self._may_write = self._memory.try_write(room + begin, self._data[begin : self._from])
                if self._may_write:
                    self._from = begin
        finally:  # also if a signal handler raises: the receiver waits for these words
            self._announce(CLAIMED, self._from)
            self._announce(WRITTEN_FROM, self._from)
        return self._from == begin
