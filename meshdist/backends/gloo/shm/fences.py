"""Fences: the order of loads and stores in shared memory, as other processors see it.

x86-64 keeps the order of loads and the order of stores; only a store may pass a later load. Other processors keep
neither. Aligned 64-bit words are loaded and stored in one access: CPython copies them by `memcpy` of constant size,
which compilers turn into one instruction.
"""

from __future__ import annotations

import platform
import threading
from typing import TypeAlias

KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


def fence() -> None:
    """Order all earlier loads and stores before all later ones.

    Taking and releasing a lock has acquire and release order: neighbouring accesses may move into the critical section
    but not out of it. So accesses after a second lock cannot pass accesses before a first one.
    """
    for _ in range(2):
        lock = threading.Lock()
        lock.acquire()
        lock.release()


class FencedWords:
    """64-bit words of shared memory that are ordered with all other loads and stores."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, index: int) -> int:
        word: int = self._words[index]
        fence()
        return word

    def __setitem__(self, index: int, word: int) -> None:
        fence()
        self._words[index] = word


Words: TypeAlias = "memoryview[int] | FencedWords"


def in_order(words: memoryview) -> Words:
    return words if KEEPS_ORDER else FencedWords(words)
