"""Matching: which message is for which receipt."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np

M = TypeVar("M")
R = TypeVar("R")
T = TypeVar("T")

EAGER_VARIABLE = "MESHDIST_EAGER_LIMIT"
DEFAULT_EAGER_BYTES = 64 << 10
_MOST_TAGS = 8


class Matching(Generic[M, R]):
    """The messages that have come to one rank and the receipts that it has posted, those without a partner.

    A receipt takes the first message from its source with its tag; a message goes to the receipt that was posted
    first, among those for its sender and those for any. Whoever uses it holds a lock.

    Example:
        >>> matching = Matching()
        >>> matching.ask("receipt", None, tag=7) is None
        True
        >>> matching.come(2, tag=7)
        'receipt'
        >>> matching.come(2, tag=7) is None
        True
        >>> matching.keep("message", 2, tag=7)
        >>> matching.ask("another receipt", 2, tag=7)
        'message'
    """

    def __init__(self) -> None:
        self._numbers = count()
        # Queues without an entry are removed: a program may use every tag once.
        self._asked: dict[tuple[int | None, int], deque[tuple[int, R]]] = {}
        self._kept: dict[tuple[int | None, int], deque[tuple[int, M]]] = {}
        self._num_for_any = 0

    def ask(self, receipt: R, source: int | None, tag: int) -> M | None:
        """Return the message for a receipt; where none has come, None, and the receipt is posted."""
        keys: list[tuple[int | None, int]] = [(source, tag)]
        if source is None:
            keys = [key for key in self._kept if key[1] == tag]
        message = _take_first(self._kept, keys) if self._kept else None
        if message is None:
            self._num_for_any += source is None
            _append(self._asked, (source, tag), (next(self._numbers), receipt))
        return message

    def come(self, source: int, tag: int) -> R | None:
        """Return the receipt for a message that has come; where none is posted, None: `keep` it."""
        if not self._num_for_any:
            return _take_first(self._asked, [(source, tag)])
        before = len(self._asked.get((None, tag), ()))
        receipt = _take_first(self._asked, [(source, tag), (None, tag)])
        self._num_for_any -= before - len(self._asked.get((None, tag), ()))
        return receipt

    @property
    def is_idle(self) -> bool:
        """Whether there is neither a message nor a receipt without a partner."""
        return not (self._asked or self._kept)

    def keep(self, message: M, source: int, tag: int) -> None:
        """Keep a message until a receipt asks for it."""
        _append(self._kept, (source, tag), (next(self._numbers), message))

    def asks(self, source: int) -> bool:
        """Return whether a receipt is posted that a message of `source` could be for, whatever its tag."""
        return any(wanted in (source, None) for wanted, _ in self._asked)

    def kept(self, source: int | None) -> list[M]:
        """Return the messages that are kept, of one source, or of all where it is None."""
        queues = [queue for (src, _), queue in self._kept.items() if source in (src, None)]
        return [message for queue in queues for _, message in queue]


class DtypeNames(dict["np.dtype[Any]", bytes]):
    """The names of dtypes as headers carry them, made once: NumPy takes microseconds to say one."""

    def __missing__(self, dtype: np.dtype[Any]) -> bytes:
        name = self[dtype] = str(dtype).encode()[:16].ljust(16, b"\0")
        return name


def _append(
    queues: dict[tuple[int | None, int], deque[tuple[int, T]]], key: tuple[int | None, int], entry: tuple[int, T]
) -> None:
    queue = queues.get(key)
    if queue is None:
        queues[key] = deque((entry,))
    else:
        queue.append(entry)


def _take_first(
    queues: dict[tuple[int | None, int], deque[tuple[int, T]]], keys: list[tuple[int | None, int]]
) -> T | None:
    there = [key for key in keys if key in queues]
    if not there:
        return None
    key = there[0] if len(there) == 1 else min(there, key=lambda key: queues[key][0][0])
    queue = queues[key]
    entry = queue.popleft()[1]
    if not queue:
        del queues[key]
    return entry


def there_are(tags: Sequence[int]) -> str:
    """Return what tags the messages have that are there while one with another tag is waited for.

    Example:
        >>> there_are([]), there_are([1]), there_are([1, 4])
        ('', '; there is one with tag 1', '; there are some with tags 1, 4')
    """
    if not tags:
        return ""
    named = ", ".join(map(str, tags[:_MOST_TAGS])) + (", ..." if len(tags) > _MOST_TAGS else "")
    return f"; there is one with tag {named}" if len(tags) == 1 else f"; there are some with tags {named}"


def eager_bytes() -> int:
    """Return up to how many bytes a message is buffered, so that its sender need not wait; -1 where none is.

    Raises:
        ValueError: `MESHDIST_EAGER_LIMIT` is not a number of bytes.
    """
    text = os.environ.get(EAGER_VARIABLE, str(DEFAULT_EAGER_BYTES))
    if not text.strip().isdecimal():
        raise ValueError(
            f"{EAGER_VARIABLE} must be a number of bytes, got {text!r}; 0 makes every send wait until it is received"
        )
    return int(text) or -1
