"""SharedRegion: the layout of a group's shared memory.

lines   a line of flags for each rank: its signals, the calls they are for, its state, the length of its text
bells   a byte for each rank: the number of the doorbell it sleeps on, 0 while it is awake
table   for each rank, its blocks for each other rank: address, bytes to it, bytes from it, address of those; twice
shared_flags   a byte for each rank: 1 if its blocks are in shared arrays; twice
places  for each rank, the places of those blocks in its shared arrays, for each other rank: see Place; twice
mail    a byte for each rank: 1 if another rank has made a channel for messages to it
texts   how a rank has left, a Departure; or its call, after a mismatch
slots   data for the other ranks; two for each rank, used in turn
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.gloo.shm.segment import Segment

WORD = 8
PAGE = 4096
# Two cache lines: processors fetch them in pairs.
LINE_WORDS = 16
TABLE_WORDS = 4
PLACE_WORDS = 3
TEXT_BYTES = PAGE
# The size of a slot. In a small group it holds what most programs move at once, in as few steps as possible (4 ranks on
# 2 cores reduced 1 MiB in two thirds of the time that it took in slots of a quarter). In larger ones it is less, and
# still less if all slots of a group would take more than `SLOTS_BYTES`.
SMALL_GROUP, LARGEST_SLOT = 4, 1 << 20
LARGE_GROUPS_SLOT, SMALLEST_SLOT = 256 << 10, 8 << 10
SLOTS_BYTES = 8 << 20

# Words of a rank's line. The signals of even and odd steps come first, then the fingerprints of their calls; the last
# four are `CORES`, the bits of the processors that it may run on.
FINGERPRINT, STATE, TEXT_LENGTH, TOKEN, ABILITIES, HEAP, OPENS_HEAPS, TRIAL, TUNING, CORES = (
    2,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    12,
)


_CORE_BITS = 64 * (LINE_WORDS - CORES)


def slot_bytes(num_ranks: int) -> int:
    """Return the size of a slot: a power of two."""
    share = SLOTS_BYTES // (2 * num_ranks)
    most = LARGEST_SLOT if num_ranks <= SMALL_GROUP else LARGE_GROUPS_SLOT
    return max(SMALLEST_SLOT, min(most, 1 << (share.bit_length() - 1)))


class SharedRegion:
    """The shared memory of a group; `words` is all of it before the slots, as 64-bit words (see segment)."""

    def __init__(self, segment: Segment, num_ranks: int) -> None:
        sizes = _Sizes(num_ranks)
        self.slot_bytes = slot_bytes(num_ranks)
        self._segment = segment
        self._num_ranks = num_ranks
        self._sizes = sizes
        self._bytes = memoryview(segment.memory).cast("B")
        self.words = self._bytes[: sizes.slots].cast("Q")
        segment.reserve(0, sizes.slots)

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        return _Sizes(num_ranks).end

    def line(self, rank: int, word: int) -> int:
        return rank * LINE_WORDS + word

    def set_cores(self, rank: int, cores: Collection[int]) -> None:
        bits = 0
        for core in cores:
            bits |= 1 << core % _CORE_BITS
        for number in range(_CORE_BITS // 64):
            self.words[self.line(rank, CORES + number)] = bits >> 64 * number & (1 << 64) - 1

    def have_own_cores(self) -> bool:
        """Return whether no two ranks may run on one core, as if each is bound to its own."""
        taken = 0
        for rank in range(self._num_ranks):
            words = [self.words[self.line(rank, CORES + number)] for number in range(_CORE_BITS // 64)]
            mine = sum(word << 64 * number for number, word in enumerate(words))
            if mine & taken or not mine:
                return False
            taken |= mine
        return True

    def bell_words(self) -> list[int]:
        """Return the indices in `words` of the bells, eight to a word."""
        return list(range(self._sizes.bells // WORD, self._sizes.table // WORD))

    def set_bell(self, rank: int, number: int) -> None:
        self._bytes[self._sizes.bells + rank] = number

    def bells(self) -> Sequence[int]:
        return self._bytes[self._sizes.bells : self._sizes.bells + self._num_ranks]

    def table(self, phase: int, rank: int) -> Array:
        """Return a rank's rows of a table: four words for each other rank."""
        words = self._num_ranks * TABLE_WORDS
        offset = self._sizes.table + (phase * self._num_ranks + rank) * words * WORD
        return self._view(offset, (self._num_ranks, TABLE_WORDS), np.dtype(np.int64))

    def table_rows(self, phase: int) -> list[memoryview]:
        row_bytes = self._num_ranks * TABLE_WORDS * WORD
        table = self.table_bytes(phase)
        return [table[rank * row_bytes : (rank + 1) * row_bytes] for rank in range(self._num_ranks)]

    def table_bytes(self, phase: int) -> memoryview:
        num_bytes = self._num_ranks * self._num_ranks * TABLE_WORDS * WORD
        begin = self._sizes.table + phase * num_bytes
        return self._bytes[begin : begin + num_bytes]

    def shared_flags(self, phase: int) -> memoryview:
        """Return the bytes that tell which ranks' blocks are in shared arrays."""
        begin = self._sizes.shared_flags + phase * _up(self._num_ranks, WORD)
        return self._bytes[begin : begin + self._num_ranks]

    def shared_flag_words(self, phase: int) -> list[int]:
        """Return the indices in `words` of the shared flags, eight to a word."""
        num_bytes = _up(self._num_ranks, WORD)
        begin = self._sizes.shared_flags + phase * num_bytes
        return list(range(begin // WORD, (begin + num_bytes) // WORD))

    def places(self, phase: int, rank: int) -> Array:
        """Return the places of a rank's blocks: a row for each other rank."""
        words = self._num_ranks * PLACE_WORDS
        offset = self._sizes.places + (phase * self._num_ranks + rank) * words * WORD
        return self._view(offset, (self._num_ranks, PLACE_WORDS), np.dtype(np.int64))

    def set_mail(self, rank: int) -> None:
        """Record that there is a channel to a rank."""
        self._bytes[self._sizes.mail + rank] = 1

    def has_mail(self, rank: int) -> bool:
        """Return whether another rank has recorded that there is a channel to this one."""
        return self._bytes[self._sizes.mail + rank] != 0

    def write_text(self, rank: int, data: bytes) -> None:
        data = data[:TEXT_BYTES]
        begin = self._sizes.texts + rank * TEXT_BYTES
        self._bytes[begin : begin + len(data)] = data
        self.words[self.line(rank, TEXT_LENGTH)] = len(data)

    def text(self, rank: int) -> bytes:
        begin = self._sizes.texts + rank * TEXT_BYTES
        length = self.words[self.line(rank, TEXT_LENGTH)]
        return bytes(self._bytes[begin : begin + length])

    def reserve_slots(self, rank: int, num_bytes: int) -> None:
        for phase in (0, 1):
            self._segment.reserve(self._slot(phase, rank), max(1, num_bytes))

    def slot(self, phase: int, rank: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        return self._view(self._slot(phase, rank) + offset, shape, dtype)

    def stacked(self, phase: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return the arrays at the same offset in all slots, stacked in one."""
        rows, strides = (self._num_ranks, math.prod(shape)), (self.slot_bytes, dtype.itemsize)
        return self._view(self._slot(phase, 0) + offset, rows, dtype, strides).reshape(self._num_ranks, *shape)

    def diagonal(self, phase: int, dtype: np.dtype[Any], length: int) -> Array:
        """Return, stacked in one array, segment i of rank i's slot."""
        strides = (self.slot_bytes + length * dtype.itemsize, dtype.itemsize)
        return self._view(self._slot(phase, 0), (self._num_ranks, length), dtype, strides)

    def seal(self) -> None:
        """Close the descriptor: all ranks have mapped the memory."""
        self._segment.seal()

    def _view(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None = None
    ) -> Array:
        view: Array = np.ndarray(shape, dtype, self._segment.memory, offset, strides)
        return view

    def _slot(self, phase: int, rank: int) -> int:
        return self._sizes.slots + (phase * self._num_ranks + rank) * self.slot_bytes


class _Sizes:
    def __init__(self, num_ranks: int) -> None:
        self.bells = num_ranks * LINE_WORDS * WORD
        self.table = self.bells + _up(num_ranks, WORD)
        self.shared_flags = self.table + 2 * num_ranks * num_ranks * TABLE_WORDS * WORD
        self.places = self.shared_flags + 2 * _up(num_ranks, WORD)
        self.mail = self.places + 2 * num_ranks * num_ranks * PLACE_WORDS * WORD
        self.texts = _up(self.mail + num_ranks, PAGE)
        self.slots = self.texts + num_ranks * TEXT_BYTES
        self.end = self.slots + 2 * num_ranks * slot_bytes(num_ranks)


def _up(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
