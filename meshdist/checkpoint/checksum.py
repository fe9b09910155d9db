"""Checksum: Fletcher's two sums over blocks of 512 bytes, as fast as memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

Sums: TypeAlias = "tuple[int, int]"  # A and B of a checksum

# Sectors of disks have 512 bytes: a sector that is lost, old or in another's place changes a sum.
BLOCK_BYTES = 512
# In the cache of a core, and enough to hide what a call from Python costs.
PART_BYTES = 1 << 20


class Checksum:
    """Sum up bytes that come in parts.

    The bytes, filled up with zeros, are blocks of 64 little-endian 64-bit words. Let `s[i]` be the sum of the words of
    block `i`. The checksum is `A = sum(s[i])` and `B = sum((i + 1) * s[i])`, modulo 2**64: a changed word changes A,
    and blocks in a different order change B (Fletcher, "An arithmetic checksum for serial transmissions", 1982). Both
    are linear: the sums of all parts of some bytes, each from the offset of the part, add up to those of the whole.

    Args:
        begin: The offset of the first byte that will be added.

    Example:
        >>> checksum = Checksum()
        >>> checksum.add(np.frombuffer(b"12345678", np.uint8))
        >>> checksum.text()
        '38373635343332313837363534333231'
    """

    def __init__(self, begin: int = 0) -> None:
        self._sum = self._weighted = 0
        self._blocks, before = divmod(begin, BLOCK_BYTES)
        self._rest = np.zeros(before, np.uint8)  # what does not fill a block yet

    def add(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Add contiguous bytes."""
        if self._rest.size:
            missing = min(BLOCK_BYTES - self._rest.size, data.size)
            self._rest, data = np.concatenate([self._rest, data[:missing]]), data[missing:]
            if self._rest.size < BLOCK_BYTES:
                return
            self._add_blocks(self._rest)
            self._rest = np.empty(0, np.uint8)
        whole = data.size - data.size % BLOCK_BYTES
        for start in range(0, whole, PART_BYTES):
            self._add_blocks(data[start : min(start + PART_BYTES, whole)])
        if whole < data.size:
            self._rest = data[whole:].copy()

    def _add_blocks(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        sums = data.view("<u8").reshape(-1, BLOCK_BYTES // 8).sum(axis=1, dtype=np.uint64)
        numbers = np.arange(self._blocks + 1, self._blocks + 1 + len(sums), dtype=np.uint64)
        self._sum = (self._sum + int(sums.sum(dtype=np.uint64))) % 2**64
        self._weighted = (self._weighted + int((numbers * sums).sum(dtype=np.uint64))) % 2**64
        self._blocks += len(sums)

    def sums(self) -> Sums:
        """Return A and B of the bytes so far."""
        if not self._rest.size:
            return self._sum, self._weighted
        padded = np.zeros(BLOCK_BYTES, np.uint8)
        padded[: self._rest.size] = self._rest
        rest = int(padded.view("<u8").sum(dtype=np.uint64))
        return (self._sum + rest) % 2**64, (self._weighted + (self._blocks + 1) * rest) % 2**64

    def text(self) -> str:
        """Return A and B of the bytes so far, each as 16 hexadecimal digits."""
        return text_of(self.sums())


def text_of(sums: Sums) -> str:
    """Return A and B as a manifest has them."""
    return "{:016x}{:016x}".format(*sums)


def contiguous_parts(array: Any, part_bytes: int = 8 * PART_BYTES) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return the bytes of an array in row-major order, little-endian, in parts of about `part_bytes`."""
    little = array.dtype.newbyteorder("<")
    if array.flags.c_contiguous and array.dtype == little:
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, data.size, part_bytes):
            yield data[start : start + part_bytes]
    elif array.ndim == 0 or array.nbytes <= part_bytes:
        # Not ascontiguousarray, which makes an array of one dimension of a 0-d one.
        yield np.array(array, dtype=little, order="C").reshape(-1).view(np.uint8)
    else:
        rows = max(1, part_bytes // max(1, array.nbytes // len(array)))
        for start in range(0, len(array), rows):
            part = array[start : start + rows]
            yield from contiguous_parts(part[0] if rows == 1 else np.array(part, dtype=little, order="C"), part_bytes)


def checksum_of(array: Any) -> str:
    """Return the checksum of the bytes of an array in row-major order."""
    checksum = Checksum()
    for part in contiguous_parts(array):
        checksum.add(part)
    return checksum.text()
