"""One deadline from the user's timeout down to every wait."""

from __future__ import annotations

import time
from datetime import timedelta

Timeout = timedelta | float

DEFAULT_TIMEOUT_S = 1800.0

FIRST_REMINDER_S = 5.0
"""How long a wait for other processes may last before it is reported."""

# The default timeout of groups, under torch's name.
default_pg_timeout = timedelta(seconds=DEFAULT_TIMEOUT_S)


def seconds(timeout: Timeout | None, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Return `timeout`, a timedelta or a number of seconds, in seconds; `default_s` if it is None.

    Raises:
        TypeError: `timeout` is neither.
        ValueError: `timeout` is negative or not a number.
    """
    if timeout is None:
        return default_s
    if isinstance(timeout, timedelta):
        timeout_s = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        timeout_s = float(timeout)
    else:
        raise TypeError(f"timeout must be a timedelta or a number of seconds, got {type(timeout).__name__}")
    if not timeout_s >= 0:
        raise ValueError(f"timeout must not be negative, got {timeout_s} s")
    return timeout_s


class Deadline:
    """A point in time that a chain of waits shares."""

    __slots__ = ("end_s", "timeout_s")

    def __init__(self, timeout: Timeout | None, default_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.timeout_s = seconds(timeout, default_s)
        self.end_s = time.monotonic() + self.timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self.end_s - time.monotonic())

    def expired(self) -> bool:
        return time.monotonic() >= self.end_s

    def slice_s(self, longest_s: float) -> float:
        """Return the length of the next uninterrupted wait: at most `longest_s`, at most the time left."""
        return min(longest_s, self.remaining_s())


class Reminder:
    """Tells when to report that a wait goes on: after FIRST_REMINDER_S, and then after twice as long each time."""

    __slots__ = ("_next_s", "_start_s")

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._next_s = FIRST_REMINDER_S

    def due_s(self) -> float | None:
        """Return how long the wait has lasted if it is time to report it, else None."""
        waited_s = time.monotonic() - self._start_s
        if waited_s < self._next_s:
            return None
        while self._next_s <= waited_s:
            self._next_s *= 2
        return waited_s
