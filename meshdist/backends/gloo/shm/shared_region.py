"""SharedRegion: the layout of a group's shared memory.

lines   a line of flags for each rank: its signals, each with the call it is for; its state, the length of its text
bells   a byte for each rank: the number of the doorbell it sleeps on, 0 while it is awake
table   for each rank, its blocks for each other rank: address, bytes to it, bytes from it, address of those; twice
shared_flags   a byte for each rank: 1 if its blocks are in shared arrays; twice
places  for each rank, the places of those blocks in its shared arrays, for each other rank: see Place; twice
mail    a byte for each rank: 1 if another rank has made a channel for messages to it
texts   how a rank has left, a Departure; or its call, after a mismatch
calls   the last calls of each rank from which it returned before the others had come: the step, the length, the text
small slots  data of few bytes for the other ranks; for each rank one for each phase of its signals
timed lines  cache lines for the other ranks to time: see cache_distance
slots   data for the other ranks; two for each rank, used in turn
early slots  the same for calls from which ranks return before the others have come; four for each rank, used in turn
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.gloo.shm.segment import Segment

WORD = 8
PAGE = 4096
LINE_BYTES = 64
# Pairs of cache lines, as processors fetch them.
LINE_WORDS = 80
TABLE_WORDS = 4
PLACE_WORDS = 3
TEXT_BYTES = PAGE
# The size of a slot. In a small group it holds what most programs move at once, in as few steps as possible (4 ranks on
# 2 cores reduced 1 MiB in two thirds of the time that it took in slots of a quarter). In larger ones it is less, and
# still less if all slots of a group would take more than `SLOTS_BYTES`.
SMALL_GROUP, LARGEST_SLOT = 4, 1 << 20
LARGE_GROUPS_SLOT, SMALLEST_SLOT = 256 << 10, 8 << 10
SLOTS_BYTES = 8 << 20

# The steps of a group have this many phases, in turn; as in the core.
NUM_PHASES = 32
# Words of a rank's line. First, for each phase, a signal and the fingerprint of its call; the last four are `CORES`,
# the bits of the processors that the rank may run on.
SIGNAL_WORDS, FINGERPRINT = 2, 1
# Where the signal of each phase is. Those of steps in a row are in different cache lines, of eight words: the core
# fetches the next line while it waits.
SIGNAL_PLACES = tuple(phase % 8 * 8 + phase // 8 * SIGNAL_WORDS for phase in range(NUM_PHASES))
STATE, TEXT_LENGTH, TOKEN, ABILITIES, HEAP, OPENS_HEAPS, TRIAL, TUNING, MISMATCHED = range(
    NUM_PHASES * SIGNAL_WORDS, NUM_PHASES * SIGNAL_WORDS + 9
)
CORES = LINE_WORDS - 4
# The words of a call: the step and the length of the text come first. As in the core.
CALL_WORDS, _CALL_LENGTH, _CALL_TEXT = 32, 1, 2
CALL_TEXT_BYTES = (CALL_WORDS - _CALL_TEXT) * WORD
# A small slot holds a call of few bytes, for which waiting takes longer than copying.
SMALL_SLOT_BYTES = 1024
# The early slots of a rank; as in the core.
NUM_EARLY_SLOTS = 4
# The cache lines of a rank that others time; as in the core.
LINES_BYTES = 8 * (PAGE + 128)


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
        self.slots = Slots(segment, num_ranks, sizes.slots, 2, slot_bytes(num_ranks))
        self.early_slots = Slots(segment, num_ranks, sizes.early_slots, NUM_EARLY_SLOTS, slot_bytes(num_ranks))
        self.small_slots = Slots(segment, num_ranks, sizes.small_slots, NUM_PHASES, SMALL_SLOT_BYTES)
        self.timed_lines = Slots(segment, num_ranks, sizes.timed_lines, 1, LINES_BYTES)
        self._segment = segment
        self._num_ranks = num_ranks
        self._sizes = sizes
        self._bytes = memoryview(segment.memory).cast("B")
        self.words = self._bytes[: sizes.slots].cast("Q")
        segment.reserve(0, sizes.calls)

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

    def call_words(self, rank: int) -> int:
        """Return the index in `words` of a rank's calls, one for each phase."""
        return self._sizes.calls // WORD + rank * NUM_PHASES * CALL_WORDS

    def write_call_text(self, rank: int, phase: int, text: bytes) -> None:
        """Record the call that a rank makes in a step of this phase; the step is the first word of `call_words`."""
        word = self._call(rank, phase)
        begin = (word + _CALL_TEXT) * WORD
        self._bytes[begin : begin + len(text)] = text
        self.words[word + _CALL_LENGTH] = len(text)

    def call(self, rank: int, step: int) -> bytes | None:
        """Return the call that a rank has recorded for a step; None if it has recorded none."""
        word = self._call(rank, step)
        if self.words[word] != step:
            return None
        begin = (word + _CALL_TEXT) * WORD
        return bytes(self._bytes[begin : begin + self.words[word + _CALL_LENGTH]])

    def reserve_slots(self, slots: Slots, rank: int, num_bytes: int) -> None:
        """Reserve so many bytes in each slot of a rank."""
        for number in range(slots.num_slots):
            self._segment.reserve(slots.offset(number, rank), max(1, num_bytes))

    def reserve_early_returns(self, rank: int) -> None:
        """Reserve what a rank writes for calls of few bytes from which ranks return before the others have come."""
        self._segment.reserve(self.call_words(rank) * WORD, NUM_PHASES * CALL_WORDS * WORD)
        self.reserve_slots(self.small_slots, rank, SMALL_SLOT_BYTES)

    def seal(self) -> None:
        """Close the descriptor: all ranks have mapped the memory."""
        self._segment.seal()

    def _call(self, rank: int, step: int) -> int:
        return self.call_words(rank) + step % NUM_PHASES * CALL_WORDS

    def _view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        view: Array = np.ndarray(shape, dtype, self._segment.memory, offset)
        return view


class Slots:
    """Slots of equal size, as many for each rank; see `collectives.dataflow.Slots`.

    Attributes:
        num_slots: How many each rank has; it uses them in turn.
        slot_bytes: The size of a slot.
        phase_bytes: How far two slots of a rank that follow each other are apart.
    """

    def __init__(self, segment: Segment, num_ranks: int, begin: int, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes, self.phase_bytes = num_slots, slot_bytes, num_ranks * slot_bytes
        self._segment, self._num_ranks, self._begin = segment, num_ranks, begin

    @cached_property
    def extent(self) -> tuple[int, int, int]:
        """The addresses at which the first slot begins and the last one ends, and the size of a slot."""
        begin: int = self.slot(0, 0, np.dtype(np.uint8), (1,)).ctypes.data
        return begin, begin + self.num_slots * self.phase_bytes, self.slot_bytes

    def offset(self, phase: int, rank: int) -> int:
        """Return where in the memory a slot begins."""
        return self._begin + phase * self.phase_bytes + rank * self.slot_bytes

    def slot(self, phase: int, rank: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        return self._view(self.offset(phase, rank) + offset, shape, dtype)

    def stacked(self, phase: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return the arrays at the same offset in all slots, stacked in one."""
        rows, strides = (self._num_ranks, math.prod(shape)), (self.slot_bytes, dtype.itemsize)
        return self._view(self.offset(phase, 0) + offset, rows, dtype, strides).reshape(self._num_ranks, *shape)

    def diagonal(self, phase: int, dtype: np.dtype[Any], length: int) -> Array:
        """Return, stacked in one array, segment i of rank i's slot."""
        strides = (self.slot_bytes + length * dtype.itemsize, dtype.itemsize)
        return self._view(self.offset(phase, 0), (self._num_ranks, length), dtype, strides)

    def _view(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None = None
    ) -> Array:
        view: Array = np.ndarray(shape, dtype, self._segment.memory, offset, strides)
        return view


class _Sizes:
    def __init__(self, num_ranks: int) -> None:
        self.bells = num_ranks * LINE_WORDS * WORD
        self.table = self.bells + _up(num_ranks, WORD)
        self.shared_flags = self.table + 2 * num_ranks * num_ranks * TABLE_WORDS * WORD
        self.places = self.shared_flags + 2 * _up(num_ranks, WORD)
        self.mail = self.places + 2 * num_ranks * num_ranks * PLACE_WORDS * WORD
        self.texts = _up(self.mail + num_ranks, PAGE)
        self.calls = self.texts + num_ranks * TEXT_BYTES
        self.small_slots = self.calls + num_ranks * NUM_PHASES * CALL_WORDS * WORD
        self.timed_lines = _up(self.small_slots + num_ranks * NUM_PHASES * SMALL_SLOT_BYTES, PAGE)
        self.slots = _up(self.timed_lines + num_ranks * LINES_BYTES, PAGE)
        self.early_slots = self.slots + 2 * num_ranks * slot_bytes(num_ranks)
        self.end = self.early_slots + NUM_EARLY_SLOTS * num_ranks * slot_bytes(num_ranks)


def _up(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
