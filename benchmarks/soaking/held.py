"""What a process holds of the machine: it must be the same after an hour as after a minute."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from sidebyside.report import table

_NAMES = ("descriptors", "threads", "memory", "allocated", "Python blocks", "shared files")
_IN_KIB = ("memory", "allocated")


class _MallInfo(ctypes.Structure):
    """What mallinfo2 returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ("_", "_", "_", "_", "hblkhd", "_", "_", "uordblks", "_", "_"))


def _allocated_kib() -> int:
    """Return how much memory the C library has given out and not got back; first it gives back what it can."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _MallInfo
        info = libc.mallinfo2()
    except (OSError, AttributeError):  # another C library
        return 0
    return int(info.uordblks + info.hblkhd) >> 10


def held() -> dict[str, int]:
    """Return what this process holds now: numbers, and its own memory in KiB.

    "memory" is resident. It has pages that the allocators keep between what is in use, and those of NumPy's huge pages,
    so it also depends on the largest arrays of the past. What a program loses shows in "allocated", of the C library,
    and in "Python blocks", the small objects. Shared files are those of this process in /dev/shm.
    """
    gc.collect()
    allocated = _allocated_kib()
    status = Path("/proc/self/status").read_text()
    threads, memory = (
        int(re.findall(rf"^{name}:\s+(\d+)", status, re.MULTILINE)[0]) for name in ("Threads", "RssAnon")
    )
    num_files, num_blocks = len(shared_files_of([os.getpid()])), sys.getallocatedblocks()
    counts = (len(os.listdir("/proc/self/fd")), threads, memory, allocated, num_blocks, num_files)
    return dict(zip(_NAMES, counts, strict=True))


def shared_files_of(pids: list[int]) -> list[Path]:
    """Return what lies in the shared memory of this host under the name of one of these processes."""
    return [path for path in Path("/dev/shm").glob("*meshdist*") if any(str(pid) in path.name for pid in pids)]


def most(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest numbers of some processes."""
    ranks = list(of_ranks)
    return {name: max(each[name] for each in ranks) for name in _NAMES}


def held_table(moments: Mapping[str, Mapping[str, int]], whose: str) -> str:
    """Return a table with a row for each moment."""
    rows = [
        (moment, *(f"{each[name] / 1024:.1f} MiB" if name in _IN_KIB else f"{each[name]:,}" for name in _NAMES))
        for moment, each in moments.items()
    ]
    return table((f"{whose} has", *_NAMES), rows)
