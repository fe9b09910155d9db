"""Arithmetic that says nothing of overflow or NaN.

What a user has NumPy do about those, by `np.seterr` or a filter of warnings, is about the user's own arithmetic. In the
middle of a call it would fail one rank, and leave the others waiting for it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import numpy as np

# Since NumPy 2 the setting is a context variable.
_IN_CONTEXT = np.lib.NumpyVersion(np.__version__) >= "2.0.0"


def quiet_runner() -> Callable[..., Any]:
    """Return what calls a function with its arguments, while NumPy ignores floating-point errors.

    It is for one caller at a time, and not for functions that need the caller's context variables.

    Example:
        >>> run = quiet_runner()
        >>> largest = np.array([3e38], np.float32)
        >>> with np.errstate(all="raise"):
        ...     run(np.add, largest, largest)
        array([inf], dtype=float32)
    """
    if not _IN_CONTEXT:
        return _in_errstate
    # The context is made once, and entering it costs nothing to speak of, where entering `np.errstate` takes a
    # microsecond.
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


def quietly(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a function once, as a `quiet_runner` does."""
    return quiet_runner()(function, *args, **keywords)


def _in_errstate(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args, **keywords)
