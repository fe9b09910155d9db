"""Files that blocks are written to and read from, at any offset; CachedFile goes through the system's page cache."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

# How much to read at once.
SPAN_BYTES = 4 << 20
# Windows changes line ends without it.
BINARY: int = getattr(os, "O_BINARY", 0)
# Linux reads and writes at most 2 GiB at once.
MOST_BYTES = 1 << 30

if sys.platform == "win32":
    # A rank has opened the file for itself, so that nobody else moves its position.

    def write_at(fd: int, data: memoryview, offset: int) -> int:
        """Write some of the bytes; return how many."""
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)

    def read_at(fd: int, out: memoryview, offset: int) -> int:
        """Read some of the bytes; return how many, 0 at the end."""
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(out))
        out[: len(data)] = data
        return len(data)
else:

    def write_at(fd: int, data: memoryview, offset: int) -> int:
        """Write some of the bytes; return how many."""
        return os.pwrite(fd, data, offset)

    def read_at(fd: int, out: memoryview, offset: int) -> int:
        """Read some of the bytes; return how many, 0 at the end."""
        return os.preadv(fd, [out], offset)


# pathlib makes one slash of two; a drive of Windows has one letter.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder of this machine.

    Raises:
        ValueError: It is a URL, or begins with "~/", which only a shell expands.
    """
    text = os.fspath(path)
    if match := _URL.match(text):
        raise ValueError(
            f"{text} is a URL ({match[1]}), and checkpoints are in folders of a file system: save to a folder and copy"
            " it, copy the checkpoint to a folder before you load it, or mount the store"
        )
    if text.split("/")[0] == "~":
        raise ValueError(f"{text} begins with ~, which only a shell expands: pass os.path.expanduser(path)")
    return Path(path)


# The types of file systems whose files are in memory: tmpfs and ramfs, as statfs(2) numbers them.
_IN_MEMORY = (0x01021994, 0x858458F6)


def is_in_memory(path: Path) -> bool:
    """Return whether a file system has its files in memory alone, such as /dev/shm."""
    if sys.platform != "linux":
        return False
    found = (ctypes.c_long * 64)()  # a struct statfs, which begins with the type
    return ctypes.CDLL(None).statfs(os.fsencode(path), found) == 0 and found[0] & 0xFFFFFFFF in _IN_MEMORY


class CachedFile:
    """An open file.

    Args:
        fd: Its descriptor, which stays open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def fill(self, out: Bytes, offset: int) -> Iterator[Bytes]:
        """Fill `out` with the bytes at `offset`, and yield its parts in order, each when it is read.

        Raises:
            EOFError: The file ends before.
        """
        for at in range(0, out.size, SPAN_BYTES):
            part = out[at : at + SPAN_BYTES]
            read_all(self.fd, part, offset + at)
            yield part

    def write(self, data: Bytes, offset: int) -> None:
        """Write bytes; the caller may change them afterwards."""
        write_all(self.fd, data, offset)

    def flush(self) -> None:
        """Hand all bytes to the system that `write` has kept."""

    def close(self) -> None:
        """Give up what the object has opened itself, and bytes that were not flushed."""


def write_all(fd: int, data: Any, offset: int) -> None:
    """Write all bytes, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        written = write_at(fd, view[:MOST_BYTES], offset)
        view, offset = view[written:], offset + written


def read_all(fd: int, out: Bytes, offset: int) -> None:
    """Fill `out` with the bytes at `offset`.

    Raises:
        EOFError: The file ends before.
    """
    view = memoryview(cast("Any", out))
    while view:
        count = read_at(fd, view[:MOST_BYTES], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}")
        view, offset = view[count:], offset + count
