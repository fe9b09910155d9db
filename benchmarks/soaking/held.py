"""What a process holds of the machine: it must be the same after an hour as after a minute."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from sidebyside.report import table

_NAMES = ("descriptors", "threads", "memory", "shared files")


def held() -> dict[str, int]:
    """Return what this process holds now: numbers, and its own memory in KiB.

    Memory that was freed does not count: glibc's allocator gives it back first. Shared files are those of this process
    in /dev/shm.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    threads, memory = (
        int(re.findall(rf"^{name}:\s+(\d+)", status, re.MULTILINE)[0]) for name in ("Threads", "RssAnon")
    )
    counts = (len(os.listdir("/proc/self/fd")), threads, memory, len(shared_files_of([os.getpid()])))
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
        (moment, *(f"{each[name] / 1024:.1f} MiB" if name == "memory" else f"{each[name]:,}" for name in _NAMES))
        for moment, each in moments.items()
    ]
    return table((f"{whose} has", *_NAMES), rows)
