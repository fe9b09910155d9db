"""The match queue: posted receives, and messages that arrived before their receive was posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sized
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Generic, TypeAlias, TypeVar

M = TypeVar("M")
R = TypeVar("R")
T = TypeVar("T")

_MOST_NAMED = 8

_Key: TypeAlias = "tuple[int | None, int]"


class MatchQueue(Generic[M, R]):
    """The posted receives and the unexpected messages of one rank in one group.

    A receive takes the first message from its source with its tag; a message goes to the receive posted first among
    those for its sender and those for any source. Callers hold `lock`, except for `instead`. `describe` returns a
    rank's description in errors.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.lock = lock
        self.describe: Callable[[int], str] = "rank {}".format
        self._numbers = count()
        # Queues without an entry are removed: a program may use every tag once.
        self._posted: dict[_Key, deque[tuple[int, R]]] = {}
        self._unexpected: dict[_Key, deque[tuple[int, M]]] = {}
        self._num_any_source = 0

    def post_recv(self, request: R, source: int | None, tag: int) -> M | None:
        """Return the message for a receive; if none has arrived, post the receive and return None."""
        message = None
        if self._unexpected:
            keys: list[_Key] = [(source, tag)]
            if source is None:
                keys = [key for key in self._unexpected if key[1] == tag]
            message = _take_first(self._unexpected, keys)
        if message is None:
            self._num_any_source += source is None
            _append(self._posted, (source, tag), (next(self._numbers), request))
        return message

    def match(self, source: int, tag: int) -> R | None:
        """Return the receive for an arrived message; None if none is posted: see `add_unexpected`."""
        if not self._num_any_source:
            return _take_first(self._posted, [(source, tag)])
        before = len(self._posted.get((None, tag), ()))
        request = _take_first(self._posted, [(source, tag), (None, tag)])
        self._num_any_source -= before - len(self._posted.get((None, tag), ()))
        return request

    def add_unexpected(self, message: M, source: int, tag: int) -> None:
        _append(self._unexpected, (source, tag), (next(self._numbers), message))

    @property
    def containers(self) -> tuple[Sized, Sized]:
        """What is empty while it is idle."""
        return self._posted, self._unexpected

    @property
    def is_idle(self) -> bool:
        return not (self._posted or self._unexpected)

    def first(self, source: int | None, tag: int | None) -> M | None:
        """Return the message that a receive would take, and leave it; `tag` None is any that is not of collectives."""
        if not self._unexpected:
            return None
        keys = [
            key
            for key in self._unexpected
            if source in (key[0], None) and (key[1] >= 0 if tag is None else key[1] == tag)
        ]
        return min((self._unexpected[key][0] for key in keys), key=_number_of, default=(0, None))[1]

    def has_posted(self, source: int, tag: int) -> bool:
        """Return whether a posted receive matches a message of `source` with this tag."""
        return (source, tag) in self._posted or (None, tag) in self._posted

    def awaits(self, source: int) -> bool:
        """Return whether a posted receive could match a message of `source`, whatever its tag."""
        return any(wanted in (source, None) for wanted, _ in self._posted)

    def unexpected(self, source: int | None) -> list[M]:
        if not self._unexpected:
            return []
        queues = [queue for (src, _), queue in self._unexpected.items() if source in (src, None)]
        return [message for queue in queues for _, message in queue]

    def left_over(self) -> list[tuple[int, int]]:
        """Return the source and the tag of each message that has arrived and was not received."""
        with self.lock:
            return [
                (source, tag) for (source, tag), queue in self._unexpected.items() if source is not None for _ in queue
            ]

    def instead(self, source: int | None, tag: int, arrived: Collection[tuple[int, int]] = ()) -> str:
        """Return which messages are there instead of an awaited one; empty if none are.

        `arrived` has the source and the tag of further ones.
        """
        with self.lock:
            unexpected = {(src, other) for src, other in (*self._unexpected, *arrived) if src is not None}
        tags = sorted({other for src, other in unexpected if source in (src, None) and 0 <= other != tag})
        sources = sorted(src for src, other in unexpected if source not in (src, None) and other == tag)
        parts = []
        if tags:
            parts.append(_waiting("with tag " if len(tags) == 1 else "with tags ", list(map(str, tags))))
        if sources:
            parts.append(
                _waiting(f"with {'this tag' if tags else f'tag {tag}'} from ", list(map(self.describe, sources)))
            )
        return "; ".join(parts)


def _waiting(which: str, names: list[str]) -> str:
    named = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    subject, verb = ("a message", "is") if len(names) == 1 else ("messages", "are")
    return f"{subject} {which}{named} {verb} waiting to be received"


def _number_of(entry: tuple[int, Any]) -> int:
    return entry[0]


def _append(queues: dict[_Key, deque[tuple[int, T]]], key: _Key, entry: tuple[int, T]) -> None:
    queue = queues.get(key)
    if queue is None:
        queues[key] = deque((entry,))
    else:
        queue.append(entry)


def _take_first(queues: dict[_Key, deque[tuple[int, T]]], keys: list[_Key]) -> T | None:
    there = [key for key in keys if key in queues]
    if not there:
        return None
    key = there[0] if len(there) == 1 else min(there, key=lambda key: queues[key][0][0])
    queue = queues[key]
    entry = queue.popleft()[1]
    if not queue:
        del queues[key]
    return entry
