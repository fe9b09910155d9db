"""A joint copy: the receiver of a long message reads it from its beginning on, its sender writes it from its end on.

So two processors copy. Where the sender does other things, or has no processor, the receiver reads all of it but the
piece that the sender has begun.

Each side says in the channel how far it is going before it goes there, then looks what the other has said, and keeps
out of that: the receiver what it is reading, and where its array is (READING, ROOM), the sender from where on it is
writing and has written (CLAIMED, WRITTEN_FROM). With a fence between the two at least one of two that say it at once
sees the other: the argument of E. W. Dekker's mutual exclusion (in Dijkstra, "Cooperating sequential processes", 1965).
Of two that see each other the sender gives way. So once the receiver has gone as far as the sender has written, the
sender writes no more, and the array is the user's again.
"""

from __future__ import annotations

from meshdist.arrays import Array
from meshdist.backends.gloo.arena import PAGE
from meshdist.backends.gloo.channel import CLAIMED, READING, ROOM, WRITTEN_FROM, Channel, Header
from meshdist.backends.gloo.fences import fence
from meshdist.backends.gloo.single_copy import Memory, address_of, may_copy
from meshdist.systems import let_others_run

# A side goes a third of the way that is left between the two at a time, so that both come to the end together; but no
# less than this, which is left to the receiver at last.
_SHARE, _SHORTEST_PIECE = 3, 64 << 10
# What is said is said of a message: the number of the message, and a place in it.
# Numbers begin anew at 1; 0 stands where nothing has been said.
_PLACE_BITS, _NUMBERS = 40, (1 << 24) - 1
_PLACE = (1 << _PLACE_BITS) - 1
# How often the receiver looks whether the sender has written the rest, letting it run.
_LOOKS = 60


class _Part:
    """What both sides have in common: a message, of which the words say where who is."""

    def __init__(self, channel: Channel, memory: Memory, header: Header) -> None:
        self._words = channel.words
        self._memory = memory
        self._size = header.num_bytes
        self._number = header.number % _NUMBERS + 1 << _PLACE_BITS

    def _piece(self, between: int) -> int:
        """Return how many bytes to go, of so many between the two sides."""
        return max(_SHORTEST_PIECE, between // _SHARE & -PAGE)

    def _say(self, word: int, place: int) -> None:
        self._words[word] = self._number | place

    def _said(self, word: int) -> int | None:
        """Return the place that a word says, None where it is about another message."""
        said = self._words[word]
        return said & _PLACE if said & ~_PLACE == self._number else None


class JointReading(_Part):
    """The receiver's part.

    Args:
        channel: The channel that the message was announced in.
        memory: The sender's.
        header: The message's.
        target: Where to, as bytes.

    Attributes:
        target: The same.
    """

    def __init__(self, channel: Channel, memory: Memory, header: Header, target: Array) -> None:
        super().__init__(channel, memory, header)
        self.target = target
        self._address = header.address
        self._there = 0
        self._is_revoked = False
        self._words[ROOM] = address_of(target)
        self._claim(self._piece(self._size))

    def read_on(self) -> bool:
        """Read up to what the sender has claimed; return whether it has written all of that."""
        looks = _LOOKS
        while looks:
            end = self._claimed()
            if self._there < end:
                goal = self._there + self._piece(end - self._there)
                self._claim(goal)
                end = min(goal, self._claimed())
                if self._there < end:
                    self._memory.read(self._address + self._there, self.target[self._there : end])
                    self._there = end
            elif self._has_all():
                return True
            else:
                looks -= 1
                let_others_run()
        return False

    def revoke(self) -> None:
        """Let the sender begin to write nothing more."""
        self._is_revoked = True
        self._claim(self._size)

    def is_quiet(self) -> bool:
        """Return whether the sender has written all that it has claimed."""
        return self._written_from() is not None

    def _has_all(self) -> bool:
        # What it has read reaches as far as what the sender has written, and so the sender cannot claim more.
        begin = self._written_from()
        return begin is not None and self._there >= begin

    def _written_from(self) -> int | None:
        # From where on the sender has written; None while it is writing. Each word is looked at once, in this order.
        written, claimed = self._said(WRITTEN_FROM), self._said(CLAIMED)
        if claimed is None:
            return self._size
        return claimed if claimed == written else None

    def _claim(self, end: int) -> None:
        self._say(READING, self._size if self._is_revoked else min(end, self._size))
        fence()

    def _claimed(self) -> int:
        claimed = self._said(CLAIMED)
        return self._size if claimed is None else claimed


class JointWriting(_Part):
    """The sender's part.

    Args:
        channel: The channel that the message was announced in.
        memory: The receiver's.
        header: The message's.
        data: The message, as bytes.
    """

    def __init__(self, channel: Channel, memory: Memory, header: Header, data: Array) -> None:
        super().__init__(channel, memory, header)
        self._data = data
        self._from = header.num_bytes
        self._may_write = may_copy()

    def write_piece(self) -> bool:
        """Write a piece of what the receiver has not come to, if it has begun; return whether there was any."""
        reading = self._said(READING)
        if reading is None or not self._may_write:
            return False
        begin = self._from - self._piece(self._from - reading)
        if reading > begin:
            return False
        room = self._words[ROOM]
        self._say(CLAIMED, begin)
        try:
            fence()
            reading = self._said(READING)
            if reading is not None and reading <= begin:
                self._may_write = self._memory.try_write(room + begin, self._data[begin : self._from])
                if self._may_write:
                    self._from = begin
        finally:  # where a signal handler raises, too: the receiver waits for it
            self._say(CLAIMED, self._from)
            self._say(WRITTEN_FROM, self._from)
        return self._from == begin
