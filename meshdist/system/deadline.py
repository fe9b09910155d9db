"""One deadline from the user's timeout down to every wait."""

from __future__ import annotations

import time
from datetime import timedelta

Timeout = timedelta | float

DEFAULT_TIMEOUT_S = 1800.0
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
