"""Ranges that NVIDIA's profilers show beside the kernels, as CuPy makes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Ranges(NamedTuple):
    """What opens and closes ranges of the calling thread.

    Attributes:
        open: Begins a range inside of those that are open; takes its name.
        close: Ends the one that was opened last.
    """

    open: Callable[[str], object]
    close: Callable[[], object]


def nvtx_ranges() -> Ranges | None:
    """Return what opens and closes ranges; None where CuPy is not loaded: then nothing of theirs is worth seeing."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return None
    nvtx = cupy.cuda.nvtx
    return Ranges(nvtx.RangePush, nvtx.RangePop)
