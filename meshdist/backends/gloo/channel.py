"""A channel: shared memory that carries messages one way, from one rank to one other.

    words   counters and flags; the sender writes one line of them, the receiver the other
    texts   what a side that gives up says
    ring    entries: a header, then the message, if it comes that way; a message may go on at the ring's beginning

Head and tail count bytes ever written and ever read. Only the sender writes the head, only the receiver the tail. Both
move on in the middle of a message: while the sender writes one piece, the receiver reads the last, and a message may be
longer than the ring. Where the sender does not come to write the next piece, a receiver that can read its memory takes
the rest there, and the sender cuts the message. Long messages both copy from where they are: see joint_copy.
"""

from __future__ import annotations

import struct
import threading
from typing import Any, NamedTuple

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.gloo.fences import in_order
from meshdist.backends.gloo.segment import Segment

RING_BYTES = 256 << 10
_TEXTS, _TEXT_BYTES, RING = 512, 1536, 4096
CHANNEL_BYTES = RING + RING_BYTES

# Words of the sender's line, then of the receiver's. A side's line has its bells, its state and its text's
# length in the same places.
HEAD, TOKEN, TOKEN_VALUE, _WRITTEN, _CUT, _CUT_AT, CLAIMED, WRITTEN_FROM = 0, 4, 5, 6, 7, 8, 9, 10
TAIL, MODE, TAKEN, ROOM, READING = 16, 20, 21, 22, 23
_BELLS, _STATE, _TEXT_LENGTH = 1, 2, 3
SENDER, RECEIVER = 0, 16
_MOST_BELLS = 64
# Modes: how the receiver gets messages that are too long for an entry.
UNKNOWN, READS, STREAMS = 0, 1, 2

# What an entry is: a message that its sender does not wait for, one that it does until it is received, or where one of
# these is in the sender's memory.
WHOLE, LONG, ELSEWHERE = 1, 2, 3

# Headers and messages begin at multiples of this, a header is no longer, and so is never cut.
UNIT = 64
# What of a header all messages of a kind have in common: what it is, tag, bytes, name of the dtype; then what is of one
# alone: address, number.
_KIND, _OWN = struct.Struct("<3q16s"), struct.Struct("<2q")
# How much is written before the other side may read it, who reads as much meanwhile: not too much at first, for it to
# begin, then more, as each piece costs a microsecond on each side. (64 KiB in one piece took four fifths of the time
# that they took in three.)
FIRST_PIECE, _LONGEST_PIECE = 64 << 10, 128 << 10
# How often a side looks whether the other one, which is under way, has written or read on.
_LOOKS = 60


class Header(NamedTuple):
    """What an entry says of a message.

    Attributes:
        kind: What the entry is.
        tag: Of the message.
        num_bytes: Its length.
        dtype: The name of its dtype.
        address: Where it is in the sender's memory.
        number: Counts those that the sender waits for.
    """

    kind: int
    tag: int
    num_bytes: int
    dtype: bytes
    address: int = 0
    number: int = 0


def entry_bytes(num_bytes: int) -> int:
    """Return how much of the ring a message takes, header included."""
    return UNIT + (num_bytes + UNIT - 1 & -UNIT)


class Channel:
    """One side's view of a channel.

    Args:
        segment: `CHANNEL_BYTES` of shared memory.
        side: `SENDER` or `RECEIVER`.

    Attributes:
        segment: The same.
        memory: All of it, as bytes.
        words: What is before the texts, as 64-bit words, in order with the rest.
        others_bells: The word that says which doorbells the other side sleeps on.
        others_state: The word that says whether the other side has left or failed.
    """

    def __init__(self, segment: Segment, side: int) -> None:
        segment.reserve(0, CHANNEL_BYTES)
        self.segment = segment
        self.memory = memoryview(segment.memory).cast("B")
        self.words = in_order(self.memory[:_TEXTS].cast("Q"))
        self._ring: Array = np.ndarray((RING_BYTES,), np.uint8, segment.memory, RING)
        self._lock = threading.Lock()
        self._side = side
        other = RECEIVER - side
        self.others_bells, self.others_state = other + _BELLS, other + _STATE
        self._others_length = other + _TEXT_LENGTH
        self._others_text = _TEXTS + (_TEXT_BYTES if other == RECEIVER else 0)

    def ring_of(self, dtype: np.dtype[Any]) -> Array:
        """Return the ring as elements of a dtype whose size divides that of a word."""
        ring: Array = np.ndarray((RING_BYTES // dtype.itemsize,), dtype, self.segment.memory, RING)
        return ring

    def has_room(self, num_bytes: int) -> bool:
        """Return whether there is room for the entry of a message, all of it."""
        words = self.words
        return words[HEAD] + entry_bytes(num_bytes) - words[TAIL] <= RING_BYTES

    def announce(self, header: Header) -> bool:
        """Append an entry without its message; return False, and do nothing, where there is no room for it."""
        words = self.words
        head = words[HEAD]
        if head + UNIT - words[TAIL] > RING_BYTES:
            return False
        place = RING + head % RING_BYTES
        _KIND.pack_into(self.memory, place, *header[:4])
        _OWN.pack_into(self.memory, place + _KIND.size, *header[4:])
        words[HEAD] = head + UNIT
        return True

    def fill(self, data: Array, written: int) -> int:
        """Write on in the message that was announced, as far as there is room.

        Args:
            data: The message, as bytes.
            written: How much of it has been written.

        Returns:
            How much has been written now.
        """
        words, ring, size, looks = self.words, self._ring, data.size, _LOOKS
        head = words[HEAD]
        while written < size:
            place = head % RING_BYTES
            piece = min(_LONGEST_PIECE, max(FIRST_PIECE, written))
            length = min(size - written, piece, RING_BYTES - place, words[TAIL] + RING_BYTES - head)
            if length:
                ring[place : place + length] = data[written : written + length]
                written += length
                # All but the last piece are whole units anyway.
                head += length + UNIT - 1 & -UNIT
                words[HEAD] = head
            else:
                looks -= 1
                if looks < 0:
                    break
        return written

    def say_written(self, number: int) -> None:
        """Say that a long message is written to its end."""
        self.words[_WRITTEN] = number

    def cut(self, number: int) -> None:
        """End a long message early, whose receiver has read the rest of it out of the sender's memory."""
        words = self.words
        words[_CUT_AT] = words[HEAD]
        words[_CUT] = number

    def is_empty(self) -> bool:
        """Return True where there is nothing to read."""
        return self.words[HEAD] == self.words[TAIL]

    def peek(self) -> Header | None:
        """Return the header of the next entry, where there is one; it stays until `drop`. Not in a message."""
        words = self.words
        tail = words[TAIL]
        if words[HEAD] == tail:
            return None
        place = RING + tail % RING_BYTES
        return Header(*_KIND.unpack_from(self.memory, place), *_OWN.unpack_from(self.memory, place + _KIND.size))

    def drop(self) -> None:
        """Go on behind the header that `peek` returned."""
        self.words[TAIL] += UNIT

    def pour(self, target: Array, there: int) -> int:
        """Read on in the message whose header was dropped, as far as it is there.

        Args:
            target: Where to, as bytes.
            there: How much of it has been read.

        Returns:
            How much has been read now.
        """
        words, size, looks = self.words, target.size, _LOOKS
        tail = words[TAIL]
        while there < size:
            length = self._copy(tail, target, there)
            if length:
                there += length
                tail += length + UNIT - 1 & -UNIT
                words[TAIL] = tail
            else:
                looks -= 1
                if looks < 0:
                    break
        return there

    def skip(self, number: int, rest: int) -> bool:
        """Go on behind a long message, of which so many bytes were read elsewhere.

        Returns:
            Whether the sender has come to its end, by writing or by cutting it; until it has, nothing is done.
        """
        words = self.words
        # Looked at before the cut: a message behind one that was cut may be written as well.
        is_written = words[_WRITTEN] >= number
        if words[_CUT] == number:
            words[TAIL] = words[_CUT_AT]
        elif is_written:
            words[TAIL] += rest + UNIT - 1 & -UNIT
        else:
            return False
        return True

    def read_whole(self, target: Array) -> bool:
        """Read the message of the next entry; return False, and have done nothing, where the rest does not come."""
        words, size, looks, there = self.words, target.size, _LOOKS, 0
        tail = words[TAIL] + UNIT
        while there < size:
            length = self._copy(tail + there, target, there)
            there += length
            if not length:
                looks -= 1
                if looks < 0:
                    return False
        words[TAIL] = tail + (size + UNIT - 1 & -UNIT)
        return True

    def sleep_on(self, number: int) -> None:
        """Say that a thread of this side sleeps on doorbell `number`.

        Without a bit for it, a thread beyond the sixty-fourth is not rung, and wakes when its nap ends.
        """
        if number <= _MOST_BELLS:
            with self._lock:
                self.words[self._side + _BELLS] |= 1 << (number - 1)

    def wake_up(self, number: int) -> None:
        """Take back `sleep_on`."""
        if number <= _MOST_BELLS:
            with self._lock:
                self.words[self._side + _BELLS] &= ~(1 << (number - 1))

    def sleepers(self) -> int:
        """Return the doorbells that threads of the other side sleep on: bit k for number k + 1."""
        return self.words[self.others_bells]

    def say(self, state: int, text: str) -> None:
        """Say that this side has left or failed; what was said first stands, as it says why."""
        if self.words[self._side + _STATE]:
            return
        data = text.encode()[:_TEXT_BYTES]
        begin = _TEXTS + (_TEXT_BYTES if self._side == RECEIVER else 0)
        self.memory[begin : begin + len(data)] = data
        self.words[self._side + _TEXT_LENGTH] = len(data)
        self.words[self._side + _STATE] = state

    def has_said(self) -> bool:
        """Return True once the other side has left or failed."""
        return self.words[self.others_state] != 0

    def state(self) -> tuple[int, str]:
        """Return what the other side said: its state, 0 while it is well, and a text."""
        state, begin = self.words[self.others_state], self._others_text  # what is said first is written last
        text = bytes(self.memory[begin : begin + self.words[self._others_length]])
        return state, text.decode(errors="replace")

    def _copy(self, tail: int, target: Array, there: int) -> int:
        # One piece of a message that goes on at `tail`; returns how long it is.
        place = tail % RING_BYTES
        length: int = min(target.size - there, self.words[HEAD] - tail, RING_BYTES - place)
        if length:
            target[there : there + length] = self._ring[place : place + length]
        return length


def kind_of(header: Header) -> bytes:
    """Return what the entries of all messages like this one begin with."""
    return _KIND.pack(*header[:4])
