"""Stacks: where the threads of this process are, in the user's code and below it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple

from meshdist.call import is_ours

_DEEPEST = 40
# What asks for stacks is in them itself.
_ASKERS = tuple(str(PurePath(__file__).parent / name) for name in ("dump.py", "signals.py", "vigil.py"))


class Stack(NamedTuple):
    """Where one thread is.

    Attributes:
        lines: "file:line in function", the outermost first; of a very deep stack the innermost.
        place: The innermost of the user's own lines; None where there is none.
        in_call: Whether that line has called this package and waits for it.

    Example:
        >>> import sys
        >>> stack_of(sys._getframe()).in_call
        False
    """

    lines: list[str]
    place: str | None
    in_call: bool


def stacks() -> dict[int, Stack]:
    """Return the stack of every thread by the thread's number."""
    return {number: stack_of(frame) for number, frame in _frames().items()}


def _frames() -> dict[int, FrameType]:
    # Python 3.10, and 3.11 before 3.11.9, may hang where garbage is collected in here, such as a threading.local: both
    # take the lock of the list of threads (python/cpython issue 106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def stack_of(frame: FrameType | None) -> Stack:
    """Return the stack that ends in `frame`, without what began it, and this package's code that asks for stacks."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        if frame.f_code.co_filename in _ASKERS:
            frames.clear()
        frame = frame.f_back
    own = _first(frames, _is_own)
    if own is not None:
        # What has started the user's code is of no interest: the launcher, or threading.
        while not _is_own(frames[-1].f_code.co_filename):
            frames.pop()
    else:
        own = _first(frames, lambda file: not is_ours(file))
    return Stack(
        lines=[_line(frame) for frame in frames[:_DEEPEST]][::-1],
        place=None if own is None else _line(frames[own]),
        in_call=any(is_ours(frame.f_code.co_filename) for frame in frames[:own]),
    )


def _first(frames: list[FrameType], wanted: Callable[[str], bool]) -> int | None:
    return next((number for number, frame in enumerate(frames) if wanted(frame.f_code.co_filename)), None)


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_own(file: str) -> bool:
    return not is_ours(file) and not _is_librarys(file)


def _is_librarys(file: str) -> bool:
    return "/lib/python3" in file or "/lib64/python3" in file or file.startswith("<frozen")
