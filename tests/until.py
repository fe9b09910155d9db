"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout_s: float = 15.0) -> T:
    """Poll until `condition` returns something true, and return that.

    Args:
        condition: Asked again and again.
        what: What is waited for, for the message of the AssertionError once `timeout_s` are over.
        timeout_s: How long to wait.
    """
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.002)
    return found
