"""A channel: shared memory that carries messages one way, from one rank to one other.

    words   counters and flags; the sender writes one line of them, the receiver the other
    texts   what a side that gives up says
    ring    entries: a header and, behind it, bytes; an entry is never cut, what does not fit at the end begins anew

Head and tail count bytes ever written and ever read. Only the sender writes the head, only the receiver the tail.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.gloo.segment import Segment

RING_BYTES = 256 << 10
_TEXTS, _TEXT_BYTES, _RING = 512, 1536, 4096
CHANNEL_BYTES = _RING + RING_BYTES

# Words of the sender's line, then of the receiver's. A side's line has its bells, its state and its text's
# length in the same places.
HEAD, TOKEN, TOKEN_VALUE = 0, 4, 5
TAIL, MODE, TAKEN = 16, 20, 21
_BELLS, _STATE, _TEXT_LENGTH = 1, 2, 3
SENDER, RECEIVER = 0, 16
_MOST_BELLS = 64
# Modes: how the receiver gets messages that are too long for an entry.
UNKNOWN, READS, STREAMS = 0, 1, 2

# What it is, tag, bytes, address, number, name of the dtype.
_HEADER = struct.Struct("<5q16s")
_HEADER_BYTES = _HEADER.size
Header = tuple[int, int, int, int, int, bytes]


class Channel:
    """One side's view of a channel.

    Args:
        segment: `CHANNEL_BYTES` of shared memory.
        side: `SENDER` or `RECEIVER`.
    """

    def __init__(self, segment: Segment, side: int) -> None:
        segment.reserve(0, CHANNEL_BYTES)
        self.segment = segment
        self._bytes = memoryview(segment.memory).cast("B")
        self.words = self._bytes[:_TEXTS].cast("Q")
        self._ring: Array = np.ndarray((RING_BYTES,), np.uint8, segment.memory, _RING)
        self._rings: dict[np.dtype[Any], Array] = {}
        self._lock = threading.Lock()
        self._side = side
        self._other = RECEIVER - side

    def write(self, header: Header, payload: Array) -> bool:
        """Append an entry; return False, and do nothing, where there is no room for it.

        Args:
            header: What it is; its number of bytes is that of the payload, or of what is to come.
            payload: A plain array.
        """
        words = self.words
        head = words[HEAD]
        place = head % RING_BYTES
        length = _HEADER_BYTES + (payload.nbytes + 7 & -8)
        skipped = RING_BYTES - place if place + length > RING_BYTES else 0
        if head + skipped + length - words[TAIL] > RING_BYTES:
            return False
        if skipped:
            # Headers are written at multiples of 8; where not even one fits, the reader skips by itself.
            if skipped >= _HEADER_BYTES:
                _HEADER.pack_into(self._bytes, _RING + place, SKIP, 0, 0, 0, 0, b"")
            place = 0
        _HEADER.pack_into(self._bytes, _RING + place, *header)
        elements = _elements(payload)
        self._room(place + _HEADER_BYTES, elements)[...] = elements
        words[HEAD] = head + skipped + length
        return True

    def is_empty(self) -> bool:
        """Return True where there is no entry to read."""
        return self.words[HEAD] == self.words[TAIL]

    def peek(self) -> tuple[Header, Array] | None:
        """Return the next entry, header and bytes, where there is one; it stays until `drop`."""
        words = self.words
        tail = words[TAIL]
        while words[HEAD] != tail:
            place = tail % RING_BYTES
            left = RING_BYTES - place
            if left >= _HEADER_BYTES:
                header: Any = _HEADER.unpack_from(self._bytes, _RING + place)
                if header[0] != SKIP:
                    begin = place + _HEADER_BYTES
                    size = header[2] if header[0] in CARRYING else 0
                    return header, self._ring[begin : begin + size]
            tail = words[TAIL] = tail + left
        return None

    def take(self, tag: int, dtype_name: bytes, array: Array) -> bool:
        """Read the next entry into `array` if it is a whole message that fits; else return False, and do nothing."""
        words = self.words
        tail = words[TAIL]
        place = tail % RING_BYTES
        if words[HEAD] == tail or place > RING_BYTES - _HEADER_BYTES:
            return False
        kind, its_tag, num_bytes, _, _, its_dtype = _HEADER.unpack_from(self._bytes, _RING + place)
        if kind != WHOLE or its_tag != tag or num_bytes != array.nbytes or its_dtype != dtype_name:
            return False
        elements = _elements(array)
        elements[...] = self._room(place + _HEADER_BYTES, elements)
        words[TAIL] = tail + _HEADER_BYTES + (num_bytes + 7 & -8)
        return True

    def drop(self, payload: Array) -> None:
        """Give back the room of the entry that `peek` returned."""
        self.words[TAIL] += _HEADER_BYTES + (payload.size + 7 & -8)

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
        return self.words[self._other + _BELLS]

    def say(self, state: int, text: str) -> None:
        """Say that this side has left or failed; what was said first stands, as it says why."""
        if self.words[self._side + _STATE]:
            return
        data = text.encode()[:_TEXT_BYTES]
        begin = _TEXTS + (_TEXT_BYTES if self._side == RECEIVER else 0)
        self._bytes[begin : begin + len(data)] = data
        self.words[self._side + _TEXT_LENGTH] = len(data)
        self.words[self._side + _STATE] = state

    def has_said(self) -> bool:
        """Return True once the other side has left or failed."""
        return self.words[self._other + _STATE] != 0

    def state(self) -> tuple[int, str]:
        """Return what the other side said: its state, 0 while it is well, and a text."""
        state = self.words[self._other + _STATE]
        begin = _TEXTS + (_TEXT_BYTES if self._other == RECEIVER else 0)
        return state, bytes(self._bytes[begin : begin + self.words[self._other + _TEXT_LENGTH]]).decode(
            errors="replace"
        )

    def _room(self, begin: int, elements: Array) -> Array:
        # What is in the ring from `begin` on, as such elements, as many.
        dtype = elements.dtype
        ring = self._rings.get(dtype)
        if ring is None:
            ring = self._rings[dtype] = np.ndarray((RING_BYTES // dtype.itemsize,), dtype, self.segment.memory, _RING)
        begin //= dtype.itemsize
        return ring[begin : begin + elements.size]


# What an entry is: nothing, a whole message, the announcement of a long one, or a piece of such.
SKIP, WHOLE, LONG, PIECE = 1, 2, 3, 4
CARRYING = (WHOLE, PIECE)


def as_bytes(array: Array) -> Array:
    """Return the bytes of a plain array, flat."""
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8)


def _elements(array: Array) -> Array:
    # A plain array, flat, as elements whose size divides that of a word: the ring has them at their places.
    if array.itemsize in (8, 4, 2, 1):
        return array if array.ndim == 1 else array.reshape(-1)
    return as_bytes(array)
