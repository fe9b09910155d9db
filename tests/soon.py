"""For what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def soon(measure: Callable[[], Any], wanted: Any, timeout_s: float = 5.0) -> Any:
    """Return `measure()`, once that is `wanted`, or what it still is after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while measure() != wanted and time.monotonic() < end:
        time.sleep(0.001)
    return measure()
