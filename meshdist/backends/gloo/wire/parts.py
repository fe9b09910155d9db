"""Parts: what the ranks of a group send each other in a collective, and how they find out that their calls disagree.

Every part carries the word of its call: the fingerprint of its signature and its number among the group's collectives.
A rank that is sent the number of its call with another fingerprint is at odds with the sender. It tells all ranks what
its call is and hears what theirs are; who is told while it waits in that call does the same. So all raise, and all say
all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdist.backends.gloo.wire.connection import Connection, Place
from meshdist.backends.gloo.wire.frames import Header

if TYPE_CHECKING:
    from meshdist.backends.gloo.wire.link import Link

# The number of a call in its word; the fingerprint is above.
NUMBER = 0xFFFFFFFF
# A part that nobody has a place for yet is copied up to here; a longer one waits in the socket.
_MOST_KEPT_BYTES = 64 << 10
_NOWHERE: Place = (None, None)


class Slot:
    """The place of a part that is expected.

    Attributes:
        src: The rank of the group that sends it.
        done: It is there.
        then: Called when it is; a thread that sleeps until then may be woken by another.
    """

    __slots__ = ("_place", "done", "src", "then", "word")

    def __init__(self, src: int, place: memoryview, word: int) -> None:
        self.src = src
        self.done = False
        self.then: Callable[[], None] | None = None
        self.word = word
        self._place = place

    def place(self, word: int, num_bytes: int) -> memoryview | None:
        """Return where a part goes; None where it is not the one that is expected."""
        return self._place if word == self.word and num_bytes == len(self._place) else None

    def finish(self) -> None:
        """Learn that it is there."""
        self.done = True
        if self.then is not None:
            self.then()


class _Kept:
    """A part that came before its place was known."""

    __slots__ = ("data", "is_there", "slot", "word")

    def __init__(self, word: int, data: bytearray) -> None:
        self.word = word
        self.data = data
        self.is_there = False
        self.slot: Slot | None = None

    def finish(self) -> None:
        self.is_there = True
        if self.slot is not None:
            self.give(self.slot)

    def give(self, slot: Slot) -> bool:
        """Put it into its place as soon as it is there; return False where it is not the one that is expected."""
        place = slot.place(self.word, len(self.data))
        if place is None:
            return False
        self.slot = slot
        if self.is_there:
            if self.data:
                place[:] = self.data
            slot.finish()
        return True


class Parts:
    """The parts that come for one group. Used with the lock of the wire held.

    Attributes:
        word: That of this rank's last collective.
        completed: The number of the last collective that this rank has completed.
        calls: For each rank that is at odds with another one, the word of its call and the call in words.
    """

    def __init__(self) -> None:
        self.word = 0
        self.completed = 0
        self.calls: dict[int, tuple[int, str]] = {}
        self._is_at_odds = False
        self._expected: dict[int, deque[Slot]] = {}
        self._kept: dict[int, deque[_Kept]] = {}

    def begin(self, fingerprint: int) -> int:
        """Begin a collective, and return its word."""
        self.word = fingerprint | ((self.word + 1) & NUMBER)
        return self.word

    def is_at_odds(self) -> bool:
        """Return whether another rank makes another call than this one, or has found that yet another one does."""
        number = self.word & NUMBER
        return self._is_at_odds or any(word & NUMBER == number for word, _ in self.calls.values())

    def expects(self, src: int) -> bool:
        """Return whether there is a place for a part of a rank."""
        return bool(self._expected.get(src))

    def expect(self, src: int, place: memoryview) -> Slot:
        """Return the slot of the next part of a rank, which goes to `place`."""
        slot = Slot(src, place, self.word)
        kept = self._kept.get(src)
        if kept:
            if not kept.popleft().give(slot):
                self._is_at_odds = True
            return slot
        expected = self._expected.get(src)
        if expected is None:
            expected = self._expected[src] = deque()
        expected.append(slot)
        return slot

    def take(self, link: Link, header: Header, connection: Connection) -> Place:
        """Take the header of a part."""
        _, src, _, _, num_bytes, word, _ = header
        expected = self._expected.get(src)
        if expected:
            slot = expected[0]
            place = slot.place(word, num_bytes)
            if place is None:
                self._is_at_odds = True
                return _NOWHERE
            expected.popleft()
            return place, slot.finish
        if num_bytes > _MOST_KEPT_BYTES and not (connection.is_closed or link.is_waited_for()):
            connection.hold()
            return _NOWHERE
        if word != self.word and (word ^ self.word) & NUMBER == 0:
            self._is_at_odds = True
        kept = _Kept(word, bytearray(num_bytes))
        self._kept.setdefault(src, deque()).append(kept)
        return memoryview(kept.data), kept.finish

    def say(self, src: int, word: int, text: bytes) -> None:
        """Take what a rank says that is at odds with another."""
        self.calls[src] = word, text.decode(errors="replace")
