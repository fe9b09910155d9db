"""What lies where in the shared memory of a group.

lines   a line of flags for each rank: its posts, its state, how long its text is
bells   a byte for each rank: the number of the doorbell it sleeps on, 0 while it is awake
table   for each rank, what it has for each other rank: address, bytes to it, bytes from it, address of those; twice
signs   a byte for each rank: 1 where what it gives is in shared arrays; twice
places  for each rank, where in its shared arrays that is, for each other rank: see Place; twice
texts   what a rank that gives up says
slots   where ranks put data for the others; two for each rank, used in turn
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.gloo.segment import Segment

WORD = 8
PAGE = 4096
# Two cache lines each: processors fetch them in pairs.
LINE_WORDS = 16
TABLE_WORDS = 4
PLACE_WORDS = 3
TEXT_BYTES = PAGE
# The size of a slot: in a small group what most programs move at once, so that its ranks meet no more often than they
# must (4 ranks on 2 cores reduced 1 MiB in two thirds of the time that it took in slots of a quarter); else less, and
# still less where all slots of a group together would take more than `SLOTS_BYTES`.
SMALL_GROUP, LARGEST_SLOT = 4, 1 << 20
LARGE_GROUPS_SLOT, SMALLEST_SLOT = 256 << 10, 8 << 10
SLOTS_BYTES = 8 << 20

# Words of a rank's line. The posts of even and odd steps come first.
STATE, TEXT_LENGTH, TOKEN, SINGLE_COPY, HEAP, OPENS_HEAPS, TRIAL = 2, 3, 4, 5, 6, 7, 8


def slot_bytes(num_ranks: int) -> int:
    """Return the size of a slot in a group of that many ranks: a power of two."""
    share = SLOTS_BYTES // (2 * num_ranks)
    most = LARGEST_SLOT if num_ranks <= SMALL_GROUP else LARGE_GROUPS_SLOT
    return max(SMALLEST_SLOT, min(most, 1 << (share.bit_length() - 1)))


class Arena:
    """The shared memory of a group, divided.

    Attributes:
        words: All of it before the slots, as 64-bit words. A word is stored and loaded at once.
        slot_bytes: The size of a slot.
    """

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
        """Return how much memory a group of that many ranks divides."""
        return _Sizes(num_ranks).end

    def line(self, rank: int, word: int) -> int:
        """Return the index in `words` of a word of a rank's line."""
        return rank * LINE_WORDS + word

    def bell_words(self) -> list[int]:
        """Return the indices in `words` of the bells of all ranks, eight to a word."""
        return list(range(self._sizes.bells // WORD, self._sizes.table // WORD))

    def set_bell(self, rank: int, number: int) -> None:
        """Say which doorbell a rank sleeps on, 0 for none."""
        self._bytes[self._sizes.bells + rank] = number

    def bells(self) -> Sequence[int]:
        """Return the doorbells that the ranks sleep on."""
        return self._bytes[self._sizes.bells : self._sizes.bells + self._num_ranks]

    def table(self, use: int, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a rank's part of one of the two tables: a row of four words for each other rank."""
        words = self._num_ranks * TABLE_WORDS
        offset = self._sizes.table + (use * self._num_ranks + rank) * words * WORD
        view: np.ndarray[Any, np.dtype[np.int64]] = np.ndarray(
            (self._num_ranks, TABLE_WORDS), np.dtype(np.int64), self._segment.memory, offset
        )
        return view

    def table_rows(self, use: int) -> list[memoryview]:
        """Return the bytes of one of the two tables, cut into the parts of the ranks."""
        row_bytes = self._num_ranks * TABLE_WORDS * WORD
        table = self.table_bytes(use)
        return [table[rank * row_bytes : (rank + 1) * row_bytes] for rank in range(self._num_ranks)]

    def table_bytes(self, use: int) -> memoryview:
        """Return the bytes of one of the two tables."""
        num_bytes = self._num_ranks * self._num_ranks * TABLE_WORDS * WORD
        begin = self._sizes.table + use * num_bytes
        return self._bytes[begin : begin + num_bytes]

    def signs(self, use: int) -> memoryview:
        """Return, of one of the two, the bytes by which the ranks say whether they give shared arrays."""
        begin = self._sizes.signs + use * _up(self._num_ranks, WORD)
        return self._bytes[begin : begin + self._num_ranks]

    def sign_words(self, use: int) -> list[int]:
        """Return the indices in `words` of these bytes, eight to a word."""
        num_bytes = _up(self._num_ranks, WORD)
        begin = self._sizes.signs + use * num_bytes
        return list(range(begin // WORD, (begin + num_bytes) // WORD))

    def places(self, use: int, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return, of one of the two, where what a rank gives is in its shared arrays: a row for each other rank."""
        words = self._num_ranks * PLACE_WORDS
        offset = self._sizes.places + (use * self._num_ranks + rank) * words * WORD
        view: np.ndarray[Any, np.dtype[np.int64]] = np.ndarray(
            (self._num_ranks, PLACE_WORDS), np.dtype(np.int64), self._segment.memory, offset
        )
        return view

    def write_text(self, rank: int, text: str) -> None:
        """Put what a rank says where the others can read it."""
        data = text.encode()[:TEXT_BYTES]
        begin = self._sizes.texts + rank * TEXT_BYTES
        self._bytes[begin : begin + len(data)] = data
        self.words[self.line(rank, TEXT_LENGTH)] = len(data)

    def text(self, rank: int) -> str:
        """Return what a rank said."""
        begin = self._sizes.texts + rank * TEXT_BYTES
        length = self.words[self.line(rank, TEXT_LENGTH)]
        return bytes(self._bytes[begin : begin + length]).decode(errors="replace")

    def reserve_slots(self, rank: int, num_bytes: int) -> None:
        """Make sure that there is memory behind the first `num_bytes` of both slots of a rank."""
        for use in (0, 1):
            self._segment.reserve(self._slot(use, rank), max(1, num_bytes))

    def slot(self, use: int, rank: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return an array in a rank's slot, `offset` bytes from its beginning."""
        view: Array = np.ndarray(shape, dtype, self._segment.memory, self._slot(use, rank) + offset)
        return view

    def stacked(self, use: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return, stacked in one array, those of a shape at the same place in the slots of all ranks."""
        rows: Array = np.ndarray(
            (self._num_ranks, math.prod(shape)),
            dtype,
            self._segment.memory,
            self._slot(use, 0) + offset,
            (self.slot_bytes, dtype.itemsize),
        )
        return rows.reshape(self._num_ranks, *shape)

    def diagonal(self, use: int, dtype: np.dtype[Any], length: int) -> Array:
        """Return, stacked in one array, from each rank's slot the segment that has the rank's number."""
        rows: Array = np.ndarray(
            (self._num_ranks, length),
            dtype,
            self._segment.memory,
            self._slot(use, 0),
            (self.slot_bytes + length * dtype.itemsize, dtype.itemsize),
        )
        return rows

    def seal(self) -> None:
        """Make the memory unreachable for others: all ranks have it."""
        self._segment.seal()

    def _slot(self, use: int, rank: int) -> int:
        return self._sizes.slots + (use * self._num_ranks + rank) * self.slot_bytes


class _Sizes:
    def __init__(self, num_ranks: int) -> None:
        self.bells = num_ranks * LINE_WORDS * WORD
        self.table = self.bells + _up(num_ranks, WORD)
        self.signs = self.table + 2 * num_ranks * num_ranks * TABLE_WORDS * WORD
        self.places = self.signs + 2 * _up(num_ranks, WORD)
        self.texts = _up(self.places + 2 * num_ranks * num_ranks * PLACE_WORDS * WORD, PAGE)
        self.slots = self.texts + num_ranks * TEXT_BYTES
        self.end = self.slots + 2 * num_ranks * slot_bytes(num_ranks)


def _up(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
