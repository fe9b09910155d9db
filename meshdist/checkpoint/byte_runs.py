"""A block of a row-major array in a file: the runs of bytes that it consists of, written and read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from meshdist.checkpoint.checksum import contiguous_parts
from meshdist.checkpoint.file_access import SPAN_BYTES, Bytes, CachedFile, read_all

Index: TypeAlias = "tuple[tuple[int, int], ...]"  # for each dimension, start and stop

# Below this, one read of many runs with what lies between them is faster than one of each.
SHORT_RUN_BYTES = 16 << 10


def whole(shape: Sequence[int]) -> Index:
    """Return the index of a whole array."""
    return tuple((0, rows) for rows in shape)


def shape_of(index: Index) -> tuple[int, ...]:
    """Return the shape of a block."""
    return tuple(stop - start for start, stop in index)


def within(index: Index, outer: Index) -> tuple[slice, ...]:
    """Return the slices of the block `outer` that are the block `index`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(index, outer, strict=True))


def overlap_of(index: Index, other: Index) -> Index | None:
    """Return the block of the elements that are in both blocks; None if there are none."""
    both = tuple((max(a, start), min(b, stop)) for (a, b), (start, stop) in zip(index, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def run_dim(shape: Sequence[int], index: Index) -> int:
    """Return the first dimension behind which the block is whole: each run is the block's rows of it."""
    dim = len(shape) - 1
    while dim > 0 and index[dim] == (0, shape[dim]):
        dim -= 1
    return max(dim, 0)


def run_bytes(shape: Sequence[int], index: Index, itemsize: int) -> int:
    """Return the bytes of each run of the block."""
    if not shape:
        return itemsize
    dim = run_dim(shape, index)
    start, stop = index[dim]
    return (stop - start) * math.prod(shape[dim + 1 :]) * itemsize


def run_offsets(shape: Sequence[int], index: Index, itemsize: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return where in the array's bytes each run of the block begins, in order."""
    offsets = np.zeros(1, np.int64)
    if not shape:
        return offsets
    last = run_dim(shape, index)
    for dim in range(last + 1):
        start, stop = index[dim]
        rows = np.arange(start, stop if dim < last else start + 1, dtype=np.int64)
        offsets = (offsets[:, None] + rows * (math.prod(shape[dim + 1 :]) * itemsize)).reshape(-1)
    return offsets


def write_block(
    file: CachedFile, offset: int, shape: Sequence[int], index: Index, array: Any, also: Iterable[Any] = ()
) -> None:
    """Write a block of an array whose bytes begin at `offset`.

    Args:
        file: The file, which may keep bytes until it is flushed.
        offset: Where the array begins.
        shape: Of the array.
        index: The block.
        array: Its elements, in any order in memory.
        also: Each has a method `add`, which gets the bytes, too.
    """
    if array.size == 0:
        return
    length = run_bytes(shape, index, array.dtype.itemsize)
    offsets = run_offsets(shape, index, array.dtype.itemsize)
    done = 0
    for part in contiguous_parts(array):
        for other in also:
            other.add(part)
        at = 0
        while at < part.size:
            run, into = divmod(done, length)
            some = part[at : at + length - into]
            file.write(some, offset + int(offsets[run]) + into)
            at, done = at + some.size, done + some.size


def read_block(
    file: CachedFile,
    offset: int,
    shape: Sequence[int],
    index: Index,
    dtype: np.dtype[Any],
    into: Any = None,
    also: Sequence[Any] = (),
) -> Any:
    """Return a block of the little-endian array whose bytes begin at `offset`, reading little else.

    Args:
        file: The file.
        offset: Where the array begins.
        shape: Of the array.
        index: The block.
        dtype: Of the array.
        into: An array that becomes the block and is returned; None: a new one.
        also: Each has a method `add`, which gets the bytes in order, some MiB at a time.

    Raises:
        EOFError: The file ends before.
    """
    little = dtype.newbyteorder("<")
    if into is not None and not (into.flags.c_contiguous and into.dtype == little):
        into[...] = read_block(file, offset, shape, index, dtype, also=also)
        return into
    array = np.empty(shape_of(index), little) if into is None else into
    if array.size:
        length = run_bytes(shape, index, dtype.itemsize)
        out = array.reshape(-1).view(np.uint8)
        is_short = len(shape) > 1 and length < SHORT_RUN_BYTES and length < out.size
        if is_short:
            _read_short_runs(file.fd, offset, shape, index, dtype.itemsize, out.reshape(-1, length))
            for other in also:
                other.add(out)
        else:
            starts = run_offsets(shape, index, dtype.itemsize).tolist()
            for run, start in zip(out.reshape(-1, length), starts, strict=True):
                for part in file.fill(run, offset + start):
                    for other in also:
                        other.add(part)
    return array if dtype.isnative and array.dtype.isnative else array.astype(dtype)


def _read_short_runs(fd: int, offset: int, shape: Sequence[int], index: Index, itemsize: int, out: Bytes) -> None:
    # The runs of the rows of the dimension before theirs are equally far apart: a span of them is read at once, with
    # what is between them ("data sieving" of Thakur, Gropp and Lusk, 1999), unless that is much more than the runs.
    dim = run_dim(shape, index)
    stride = math.prod(shape[dim:]) * itemsize
    length, series = out.shape[1], index[dim - 1][1] - index[dim - 1][0]
    offsets = run_offsets(shape, index, itemsize)
    rows = max(1, SPAN_BYTES // stride) if stride < SHORT_RUN_BYTES + length else 1
    span = np.empty((rows, stride), np.uint8)
    for first in range(0, len(offsets), series):
        for row in range(first, first + series, rows):
            count = min(rows, first + series - row)
            read_all(fd, span.reshape(-1)[: (count - 1) * stride + length], offset + int(offsets[row]))
            out[row : row + count] = span[:count, :length]
