"""Frames of collectives: what has arrived for one group, and how ranks detect that their calls differ.

Every frame carries the word of its call: the fingerprint of the signature, and the sequence number in the group in the
32 bits below it. A rank
that receives its current number with another fingerprint has found a mismatch. It sends its call to all ranks and
collects theirs; a rank that receives such a frame while it waits in that call does the same. So all ranks raise, and
each error lists all calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from meshdist.backends.gloo.tcp.connection import Connection, Place
from meshdist.backends.gloo.tcp.frames import Header

# The sequence number in a word.
NUMBER = 0xFFFFFFFF
# A frame that is not expected yet is copied up to this size; a longer one stays in the socket.
_MOST_KEPT_BYTES = 64 << 10
_NOWHERE: Place = (None, None)


class AwaitedPeer(Protocol):
    def is_waited_for(self) -> bool:
        """Return whether this rank waits for anything from the peer."""


class ExpectedFrame:
    """The place of an expected frame from rank `src`. `on_done` is called on arrival, by whichever thread reads it."""

    __slots__ = ("_place", "done", "on_done", "src", "word")

    def __init__(self, src: int, place: memoryview, word: int) -> None:
        self.src = src
        self.done = False
        self.on_done: Callable[[], None] | None = None
        self.word = word
        self._place = place

    def place(self, word: int, num_bytes: int) -> memoryview | None:
        return self._place if word == self.word and num_bytes == len(self._place) else None

    def finish(self) -> None:
        self.done = True
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done()


@dataclass(slots=True, eq=False)
class _EarlyFrame:
    word: int
    data: bytearray
    is_there: bool = False
    slot: ExpectedFrame | None = None

    def finish(self) -> None:
        self.is_there = True
        if self.slot is not None:
            self.give(self.slot)

    def give(self, slot: ExpectedFrame) -> bool:
        """Copy the frame to its place once it has arrived; return False if it is not the expected one."""
        place = slot.place(self.word, len(self.data))
        if place is None:
            return False
        self.slot = slot
        if self.is_there:
            if self.data:
                place[:] = self.data
            slot.finish()
        return True


class CollectiveFrames:
    """The frames of one group's collectives. All methods need the lock of the transport."""

    def __init__(self) -> None:
        self.word = 0  # the word of this rank's last collective
        self.completed = 0  # the number of the last collective that this rank has completed
        # For each rank that has reported a mismatch, the word of its call and the call as text.
        self.calls: dict[int, tuple[int, str]] = {}
        self._has_mismatch = False
        self._expected: dict[int, deque[ExpectedFrame]] = {}
        self._kept: dict[int, deque[_EarlyFrame]] = {}

    def begin(self, fingerprint: int) -> int:
        self.word = fingerprint << 32 | ((self.word + 1) & NUMBER)
        return self.word

    def has_mismatch(self) -> bool:
        """Return whether another rank makes a different call, or has reported that a third one does."""
        number = self.word & NUMBER
        return self._has_mismatch or any(word & NUMBER == number for word, _ in self.calls.values())

    def is_behind(self) -> bool:
        """Return whether a frame of a collective that this rank has yet to begin has arrived."""
        following = (self.word + 1) & NUMBER
        return any(frame.word & NUMBER == following for frames in self._kept.values() for frame in frames)

    def expects(self, src: int) -> bool:
        return bool(self._expected.get(src))

    def expect(self, src: int, place: memoryview) -> ExpectedFrame:
        slot = ExpectedFrame(src, place, self.word)
        kept = self._kept.get(src)
        if kept:
            if not kept.popleft().give(slot):
                self._has_mismatch = True
            return slot
        expected = self._expected.get(src)
        if expected is None:
            expected = self._expected[src] = deque()
        expected.append(slot)
        return slot

    def take(self, link: AwaitedPeer, header: Header, connection: Connection) -> Place:
        _, src, _, _, num_bytes, word, _ = header
        expected = self._expected.get(src)
        if expected:
            slot = expected[0]
            place = slot.place(word, num_bytes)
            if place is None:
                self._has_mismatch = True
                return _NOWHERE
            expected.popleft()
            return place, slot.finish
        if num_bytes > _MOST_KEPT_BYTES and not (connection.is_closed or link.is_waited_for()):
            connection.hold()
            return _NOWHERE
        if word != self.word and (word ^ self.word) & NUMBER == 0:
            self._has_mismatch = True
        kept = _EarlyFrame(word, bytearray(num_bytes))
        self._kept.setdefault(src, deque()).append(kept)
        return memoryview(kept.data), kept.finish

    def add_call(self, src: int, word: int, text: bytes) -> None:
        self.calls[src] = word, text.decode(errors="replace")
