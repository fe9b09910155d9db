"""Fences: the order of loads and stores in shared memory, as other processors see it.

x86-64 keeps loads in order, and stores; only a store may come behind a later load. Other processors keep neither.
"""

from __future__ import annotations

import platform
import threading
from typing import TypeAlias

KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


def fence() -> None:
    """Order all loads and stores before against all after.

    A lock is taken and given back with acquire and release order, which lets neighbours move into the critical
    section but not through it; what comes after a second one cannot meet what came before a first one.
    """
    for _ in range(2):
        lock = threading.Lock()
        lock.acquire()
        lock.release()


class FencedWords:
    """Words by which processes tell each other what else is in the memory: in order with all loads and stores.

    Args:
        words: 64-bit words of shared memory.
    """

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
    """Return words that are loaded and stored in order on this machine's processor."""
    return words if KEEPS_ORDER else FencedWords(words)
