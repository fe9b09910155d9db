"""Channel: shared memory that carries messages from one rank to one other.

    words   counters and flags, in lines that either the sender writes or the receiver
    texts   how a side has left: a Departure
    ring    entries: a header, then the message, if it goes through the ring; messages wrap around at the ring's end

Head and tail count bytes ever written and ever read; only the sender writes the head, only the receiver the tail. Both
advance within a message: the receiver reads one piece while the sender writes the next, so a message may be longer than
the ring. If the next piece does not come, a receiver that can read the sender's memory takes the rest from there, and
the sender cuts the message. Both sides copy a still longer message between its arrays: see split_copy.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.backends.base import Backend
from meshdist.backends.gloo.shm.segment import Segment, in_order
from meshdist.runtime.departure import Departure, LeftOut, peer_gone
from meshdist.runtime.doorbells import SocketDoorbells

# What is written is to leave the writer's nearest cache before it is written again: through a ring of 256 KiB, which
# the reader's cache holds as well, 1 MiB took three times as long. A message of LONGEST_WHOLE has room as a whole.
LONGEST_WHOLE = 1 << 20
RING_BYTES = LONGEST_WHOLE + (64 << 10)
_TEXTS, _TEXT_BYTES, RING = 512, 1536, 4096
CHANNEL_BYTES = RING + RING_BYTES
# In larger groups there may be a channel for each of many pairs of ranks.
_FEW_RANKS, _SMALL_RING_BYTES = 8, 256 << 10

# The words that change with messages: the sender's, then the receiver's.
HEAD, TOKEN, TOKEN_VALUE, WRITTEN, _CUT, _CUT_AT, CLAIMED, WRITTEN_FROM, PACE = 0, 4, 5, 6, 7, 8, 9, 10, 11
TAIL, TAKEN, ROOM, READING = 16, 21, 22, 23
# Those that rarely change have lines of their own: the other side looks at them with each message, and would have to
# wait for a line that has just been written. Bells, state and text length are at the same places in both.
_BELLS, _STATE, _TEXT_LENGTH = 32, 33, 34
MODE = 51
SENDER, RECEIVER = 0, 16
_MOST_BELLS = 64
# Modes: how the receiver gets messages that are too long for one entry.
UNKNOWN, READS, STREAMS = 0, 1, 2

# Kinds of entries. EAGER: the sender does not wait. RTS: the sender waits until the message, which follows through the
# ring, is received. RTS_CMA: the same, but the message is copied between the arrays.
EAGER, RTS, RTS_CMA = 1, 2, 3

# Headers and messages begin at multiples of this. A header is no longer, so it never wraps around.
UNIT = 64
# The part of a header that all messages of a kind share: entry kind, tag, bytes, dtype name. Then the message's own:
# address, number.
_KIND, _OWN = struct.Struct("<3q16s"), struct.Struct("<2q")
# How much is written before the other side may read it: little at first, so that it can begin, then more, as each piece
# costs a microsecond on each side. (64 KiB in one piece took four fifths of the time that they took in three.)
FIRST_PIECE, _LONGEST_PIECE = 64 << 10, 128 << 10
# How often a side polls for the next piece.
_SPINS = 60


class Header(NamedTuple):
    """The header of an entry; `address` in the sender's memory; `number` counts messages that the sender waits for."""

    kind: int
    tag: int
    num_bytes: int
    dtype: bytes
    address: int = 0
    number: int = 0


def entry_bytes(num_bytes: int) -> int:
    return UNIT + (num_bytes + UNIT - 1 & -UNIT)


class Channel:
    """One side's view of a channel: `SENDER` or `RECEIVER`.

    Attributes:
        memory: All of the segment, as bytes.
        words: The words, with ordered loads and stores.
        ring_bytes: The size of the ring.
        others_bells: The word with the doorbells that the other side sleeps on.
        others_state: The word that is not 0 once the other side has left.
    """

    def __init__(self, segment: Segment, side: int) -> None:
        self.segment = segment
        self.memory = memoryview(segment.memory).cast("B")
        segment.reserve(0, len(self.memory))
        self.ring_bytes = len(self.memory) - RING
        self.words = in_order(self.memory[:_TEXTS].cast("Q"))
        self._ring: Array = np.ndarray((self.ring_bytes,), np.uint8, segment.memory, RING)
        self._lock = threading.Lock()
        self._side = side
        # Where the long messages end that the sender has written whole, and up to where the ring is free at least: what
        # has been taken is not read again, although the tail may still stand before it (see `skip`).
        self._stream = (
            None if core.module is None else core.Stream(self.memory, (RING, self.ring_bytes), (HEAD, TAIL, PACE))
        )
        self._written: deque[tuple[int, int]] = deque()
        self._free_to = 0
        other = RECEIVER - side
        self.others_bells, self.others_state = other + _BELLS, other + _STATE
        self._others_length = other + _TEXT_LENGTH
        self._others_text = _TEXTS + (_TEXT_BYTES if other == RECEIVER else 0)

    def ring_of(self, dtype: np.dtype[Any]) -> Array:
        """Return the ring as elements of a dtype whose size divides that of a word."""
        ring: Array = np.ndarray((self.ring_bytes // dtype.itemsize,), dtype, self.segment.memory, RING)
        return ring

    def has_room(self, num_bytes: int) -> bool:
        return self.words[HEAD] + entry_bytes(num_bytes) - self._tail() <= self.ring_bytes

    def announce(self, header: Header) -> bool:
        words = self.words
        head = words[HEAD]
        if head + UNIT - self._tail() > self.ring_bytes:
            return False
        place = RING + head % self.ring_bytes
        _KIND.pack_into(self.memory, place, *header[:4])
        _OWN.pack_into(self.memory, place + _KIND.size, *header[4:])
        words[HEAD] = head + UNIT
        return True

    def fill(self, data: Array, written: int, *, polls: bool = True) -> int:
        """Write more of the announced message while there is room; return how much of it has been written in all.

        With `polls`, wait a moment for more room.
        """
        if self._stream is not None:
            self._tail()
            return self._stream.fill(data, written, self._free_to, polls)
        words, ring, size, spins = self.words, self._ring, data.size, _SPINS * polls
        head = words[HEAD]
        while written < size:
            place = head % self.ring_bytes
            piece = min(_LONGEST_PIECE, max(FIRST_PIECE, written))
            length = min(size - written, piece, self.ring_bytes - place, self._tail() + self.ring_bytes - head)
            if length:
                ring[place : place + length] = data[written : written + length]
                written += length
                # All but the last piece are whole units anyway.
                head += length + UNIT - 1 & -UNIT
                words[HEAD] = head
            else:
                spins -= 1
                if spins < 0:
                    break
        return written

    def mark_written(self, number: int) -> None:
        self._written.append((number, self.words[HEAD]))
        self.words[WRITTEN] = number

    def cut(self, number: int) -> None:
        """End a long message early: the receiver has read the rest from the sender's memory."""
        words = self.words
        self._free_to = words[_CUT_AT] = words[HEAD]
        words[_CUT] = number

    def is_empty(self) -> bool:
        return self.words[HEAD] == self.words[TAIL]

    def peek(self) -> Header | None:
        """Return the header of the next entry, if any; it stays until `drop`. Not to be called within a message."""
        words = self.words
        tail = words[TAIL]
        return None if words[HEAD] == tail else self._header_at(tail)

    def peek_all(self) -> Iterator[Header]:
        """Yield the headers of the entries from the next one on, up to the first whose sender waits; as `peek`."""
        place, head = self.words[TAIL], self.words[HEAD]
        while place < head:
            header = self._header_at(place)
            yield header
            place = place + entry_bytes(header.num_bytes) if header.kind == EAGER else head

    def _header_at(self, count: int) -> Header:
        place = RING + count % self.ring_bytes
        return Header(*_KIND.unpack_from(self.memory, place), *_OWN.unpack_from(self.memory, place + _KIND.size))

    def drop(self) -> None:
        self.words[TAIL] += UNIT

    def drain(self, target: Array, there: int, *, polls: bool = True) -> int:
        """Read more of the message while it arrives; return how much of `target` has been read in all.

        With `polls`, wait a moment for more of it.
        """
        if self._stream is not None:
            return self._stream.drain(target, there, polls)
        words, size, spins = self.words, target.size, _SPINS * polls
        tail = words[TAIL]
        while there < size:
            length = self._copy(tail, target, there)
            if length:
                there += length
                tail += length + UNIT - 1 & -UNIT
                words[TAIL] = tail
            else:
                spins -= 1
                if spins < 0:
                    break
        return there

    def skip(self, number: int, rest: int) -> bool:
        """Skip a long message whose `rest` was read elsewhere; return False until the sender has finished it."""
        words = self.words
        # Check this before the cut: a message behind one that was cut may be complete as well.
        is_written = words[WRITTEN] >= number
        if words[_CUT] == number:
            words[TAIL] = words[_CUT_AT]
        elif is_written:
            words[TAIL] += rest + UNIT - 1 & -UNIT
        else:
            return False
        return True

    def read_whole(self, target: Array) -> bool:
        """Read the message of the next entry; return False, without effect, if the rest does not arrive."""
        words, size, spins, there = self.words, target.size, _SPINS, 0
        tail = words[TAIL] + UNIT
        while there < size:
            length = self._copy(tail + there, target, there)
            there += length
            if not length:
                spins -= 1
                if spins < 0:
                    return False
        words[TAIL] = tail + (size + UNIT - 1 & -UNIT)
        return True

    def sleep_on(self, number: int) -> None:
        """Record that a thread sleeps on doorbell `number`; beyond 64 it is not rung, and wakes at its next poll."""
        if number <= _MOST_BELLS:
            with self._lock:
                self.words[self._side + _BELLS] |= 1 << (number - 1)

    def wake_up(self, number: int) -> None:
        if number <= _MOST_BELLS:
            with self._lock:
                self.words[self._side + _BELLS] &= ~(1 << (number - 1))

    def sleepers(self) -> int:
        """Return the doorbells that threads of the other side sleep on: bit k stands for number k + 1."""
        return self.words[self.others_bells]

    def leave(self, departure: Departure) -> None:
        if self.words[self._side + _STATE]:
            return
        data = departure.encode(_TEXT_BYTES)
        begin = _TEXTS + (_TEXT_BYTES if self._side == RECEIVER else 0)
        self.memory[begin : begin + len(data)] = data
        self.words[self._side + _TEXT_LENGTH] = len(data)
        self.words[self._side + _STATE] = 1

    def has_left(self) -> bool:
        return self.words[self.others_state] != 0

    def others_departure(self) -> Departure | None:
        if not self.words[self.others_state]:  # written last
            return None
        begin = self._others_text
        return Departure.decode(bytes(self.memory[begin : begin + self.words[self._others_length]]))

    def _tail(self) -> int:
        # For the sender: where the part of the ring begins that may still be read.
        taken = self.words[TAKEN]
        while self._written and self._written[0][0] <= taken:
            _, self._free_to = self._written.popleft()
        return max(self.words[TAIL], self._free_to)

    def _copy(self, tail: int, target: Array, there: int) -> int:
        # Copy one piece of a message that continues at `tail`; return its length.
        place = tail % self.ring_bytes
        length: int = min(target.size - there, self.words[HEAD] - tail, self.ring_bytes - place)
        if length:
            target[there : there + length] = self._ring[place : place + length]
        return length


def channel_bytes(num_ranks: int) -> int:
    """Return the size of a channel in a group."""
    return CHANNEL_BYTES if num_ranks <= _FEW_RANKS else RING + _SMALL_RING_BYTES


def kind_of(header: Header) -> bytes:
    """Return the bytes that the entries of all messages like this one begin with."""
    return _KIND.pack(*header[:4])


class Peer:
    def __init__(self, backend: Backend, rank: int) -> None:
        assert isinstance(backend.options.bells, SocketDoorbells)
        self._bells = backend.options.bells
        self._options = backend.options
        self.global_rank = backend.options.ranks[rank]
        self.card = self._options.peers.card(self.global_rank)
        self.description = self._options.describe(rank)

    def ended(self) -> bool:
        return self._options.peers.ended(self.global_rank)

    def wake(self, channel: Channel) -> None:
        sleepers = channel.sleepers()
        number = 1
        while sleepers:
            if sleepers & 1:
                self._bells.ring(self.card.bells, number)
            sleepers >>= 1
            number += 1

    def check(self, channel: Channel, left_out: LeftOut) -> None:
        """Raise DistBackendError, which names `left_out`, if the rank has given up, left or died."""
        self.check_state(channel, left_out)
        if self.ended():
            self.check_state(channel, left_out)  # it may have recorded its departure between the two checks
            raise peer_gone(
                self.description, self._options.peers.how_ended(self.global_rank), left_out, rank=self.global_rank
            )

    def check_state(self, channel: Channel, left_out: LeftOut) -> None:
        """Like `check`, by what the rank has recorded in the channel."""
        departure = channel.others_departure()
        if departure is not None:
            raise peer_gone(self.description, departure, left_out, rank=self.global_rank)
