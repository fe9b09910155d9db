"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
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


def loaded(bound_s: float) -> float:
    """Return a bound that holds on an idle machine as it holds now: where more runs than there are processors, longer.

    Up to five times as long, which is still far from the timeouts that calls of these tests have.
    """
    share = os.getloadavg()[0] / (os.cpu_count() or 1)
    side_by_side = 2.0 if "PYTEST_XDIST_WORKER" in os.environ else 1.0
    return bound_s * min(5.0, max(side_by_side, share))
