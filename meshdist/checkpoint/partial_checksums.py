"""Checksums of pieces of which each rank has read a part: the ranks add up the sums of the parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshdist.checkpoint.byte_runs import Index, run_bytes, run_offsets, shape_of
from meshdist.checkpoint.checksum import BLOCK_BYTES, Checksum, Sums, contiguous_parts, text_of
from meshdist.checkpoint.manifest import StoredArray
from meshdist.tensor.array_layout import ArrayLayout

# From this length on, runs are summed up one by one; shorter ones many at once, in parts that with the numbers of their
# blocks are in the cache of a core.
_LONG_RUN_BYTES = 64 << 10
_SHORT_RUNS_BYTES, _LONG_RUNS_BYTES = 256 << 10, 8 << 20
_BLOCK_WORDS = BLOCK_BYTES // 8

# For each dimension of an array, the sizes of the blocks into which it is cut; None: it is not. Blocks of equal grids
# are disjoint or equal, on whichever mesh.
Grid: TypeAlias = "tuple[tuple[int, ...] | None, ...]"


class PartSums(NamedTuple):
    """The sums of the part of a piece that lies in a rank's block of an array.

    Attributes:
        name: The array.
        number: The piece, among those of the array.
        grid: The blocks of the array that the ranks read.
        part: Where the part is in the array.
        sums: What it contributes to the checksum of the piece.
    """

    name: str
    number: int
    grid: Grid
    part: Index
    sums: Sums


def grid_of(layout: ArrayLayout) -> Grid:
    """Return the blocks of a layout."""
    return tuple(None if cut is None else cut.sizes for cut in layout.cuts)


def sums_within(part: Any, index: Index, piece: Index) -> Sums:
    """Return what the elements of a part of a piece contribute to the checksum of the piece.

    Args:
        part: The elements, in any order in memory.
        index: Where they are in the array.
        piece: The piece, which they lie in.
    """
    inside = tuple((a - start, b - start) for (a, b), (start, _) in zip(index, piece, strict=True))
    length = run_bytes(shape_of(piece), inside, part.dtype.itemsize)
    offsets = run_offsets(shape_of(piece), inside, part.dtype.itemsize)
    is_short = length < _LONG_RUN_BYTES
    found: list[Sums] = []
    done = 0
    for data in contiguous_parts(part, _SHORT_RUNS_BYTES if is_short else _LONG_RUNS_BYTES):
        at = 0
        while at < data.size:
            run, into = divmod(done, length)
            count = (data.size - at) // length if is_short and into == 0 else 0
            if count:
                some = data[at : at + count * length]
                found.append(_sums_of_runs(some.reshape(-1, length), offsets[run : run + count], part.itemsize))
            else:
                some = data[at : at + length - into]
                checksum = Checksum(int(offsets[run]) + into)
                checksum.add(some)
                found.append(checksum.sums())
            at, done = at + some.size, done + some.size
    return _total(found)


def _sums_of_runs(runs: Any, offsets: Any, itemsize: int) -> Sums:
    """Return the sums of runs of bytes of equal length, each from its own offset, which is a multiple of `itemsize`."""
    found = []
    phases = offsets % 8
    for phase in range(0, 8, itemsize):  # runs that begin at the same byte of a word
        some = phases == phase
        count = int(np.count_nonzero(some))
        if count == 0:
            continue
        chosen, begins = (runs, offsets) if count == len(runs) else (runs[some], offsets[some])
        length = runs.shape[1]
        if phase or length % 8:
            padded = np.zeros((count, -(-(phase + length) // 8) * 8), np.uint8)
            padded[:, phase : phase + length] = chosen
            chosen = padded
        found.append(_sums_of_words(chosen.view("<u8"), begins // 8))
    return _total(found)


def _sums_of_words(words: Any, begins: Any) -> Sums:
    """Return the sums of rows of words, each from the word of that number."""
    places = np.arange(words.shape[1], dtype=np.int64)
    first, within_first = begins // _BLOCK_WORDS, begins % _BLOCK_WORDS
    if words.shape[1] >= _BLOCK_WORDS and (within_first == within_first[0]).all():
        # As where rows are whole blocks apart: a word's block is so many behind the row's first on all rows.
        behind = (within_first[0] + places) // _BLOCK_WORDS + 1
        of_rows, of_places = words.sum(axis=1, dtype=np.uint64), words.sum(axis=0, dtype=np.uint64)
        weighted = [first.view(np.uint64) * of_rows, behind.view(np.uint64) * of_places]
        return _modular(of_rows), sum(map(_modular, weighted)) % 2**64
    numbers = begins[:, None] + places
    numbers >>= _BLOCK_WORDS.bit_length() - 1
    weights = numbers.view(np.uint64)
    weights *= words
    total = _modular(words)
    return total, (_modular(weights) + total) % 2**64  # the blocks are numbered from 1


def _modular(words: Any) -> int:
    return int(words.sum(dtype=np.uint64))


def _total(sums: Iterable[Sums]) -> Sums:
    found = list(sums)
    return sum(a for a, _ in found) % 2**64, sum(b for _, b in found) % 2**64


def first_damaged(arrays: Mapping[str, StoredArray], by_rank: Sequence[Sequence[PartSums]]) -> tuple[str, Index] | None:
    """Return the name and the piece of an array whose parts are not what was written; None if there is none.

    A piece is not verified if some rank did not read its part of it.

    Args:
        arrays: The arrays by name.
        by_rank: What each rank has read. Of ranks that have read the same part, each must have read the same bytes.
    """
    found: dict[tuple[str, int, Grid], dict[Index, set[Sums]]] = {}
    for name, number, grid, part, sums in chain.from_iterable(by_rank):
        found.setdefault((name, number, grid), {}).setdefault(part, set()).add(sums)
    for (name, number, _), parts in found.items():
        piece, text = arrays[name].pieces[number]
        if sum(math.prod(shape_of(part)) for part in parts) != math.prod(shape_of(piece)):
            continue
        if any(len(sums) > 1 for sums in parts.values()):
            return name, piece
        if text_of(_total(next(iter(sums)) for sums in parts.values())) != text:
            return name, piece
    return None
