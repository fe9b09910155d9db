"""Stacks: where the threads of this process are, in the user's code and below it."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType
from typing import NamedTuple

from meshdist.debug.debug_level import shows_all_frames
from meshdist.debug.user_traceback import user_frames
from meshdist.runtime.call_site import is_ours, place_in

_DEEPEST = 40
# One thread at a time switches the collector off and on. Others wait for it so long: it may wait for them itself, as
# where a signal has another thread report.
_READING = threading.RLock()
_LONGEST_S = 0.5
_POOL = os.path.join("concurrent", "futures", "thread.py")
_SPAWN = os.path.join("multiprocessing", "spawn.py")
# Threads of this package; and the event loops of zarr and fsspec, which run code of these alone, for other threads.
_SERVICES = ("meshdist-", "zarr_io", "fsspecIO")
# These files ask for stacks, so their frames are dropped.
_ASKERS = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("dump.py", "signals.py", "hang_watchdog.py"))


def own_threads(harmless: Collection[int], harmless_modules: tuple[str, ...]) -> list[int]:
    """Return the ids of other threads that may run the user's code, except for the `harmless` ones.

    These are the threads of `threading`, but for those of this package, of `harmless_modules`, the event loops of zarr
    and fsspec, and those of thread pools that have nothing to do; and among other threads, which libraries make, those
    that are in the user's code now.
    """
    mine, known = threading.get_ident(), {thread.ident: thread for thread in threading.enumerate()}
    with _no_garbage_is_collected():
        return [
            number
            for number, frame in sys._current_frames().items()
            if number != mine
            and number not in harmless
            and not _is_idle(frame)
            and (_may_run_own(known[number], harmless_modules) if number in known else _is_in_own(frame))
        ]


def _may_run_own(thread: threading.Thread, harmless_modules: tuple[str, ...]) -> bool:
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return not thread.name.startswith(_SERVICES) and not any(name.startswith(harmless_modules) for name in modules)


def _is_idle(frame: FrameType) -> bool:
    """Return whether this is a thread of a pool, such as asyncio's, that waits for something to do."""
    return frame.f_code.co_name == "_worker" and frame.f_code.co_filename.endswith(_POOL)


def _is_in_own(frame: FrameType | None) -> bool:
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


class Stack(NamedTuple):
    """Where one thread is."""

    lines: list[str]  # "file:line in function", outermost first; of a very deep stack the innermost lines
    place: str | None  # the innermost line of the user's code; None where there is none
    in_call: bool  # whether that line waits for a call of this package


def stacks(threads: Collection[int] | None = None) -> dict[int, Stack]:
    """Return the stack of each of the `threads` that is there, by thread id; of every thread if None."""
    with _no_garbage_is_collected():
        frames = sys._current_frames().items()
        return {number: stack_of(frame) for number, frame in frames if threads is None or number in threads}


@contextmanager
def _no_garbage_is_collected() -> Iterator[None]:
    """Read the frames of other threads in here.

    Before Python 3.12, the garbage collector runs within allocations, so also while `f_back` makes a frame. Its
    finalizers may let the other thread run on, which frees what is being read. In `sys._current_frames`, Python 3.10,
    and 3.11 before 3.11.9, may hang: this and freeing a threading.local take the lock of the list of threads
    (python/cpython issue 106883).
    """
    is_alone = _READING.acquire(timeout=_LONGEST_S)
    was_enabled = is_alone and gc.isenabled()
    try:
        if is_alone:
            gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
        if is_alone:
            _READING.release()


def stack_of(frame: FrameType | None) -> Stack:
    """Return the stack that ends in `frame`, without the frames that started the user's code and those that ask.

    Frames of this package below the user's code are shown at debug level DETAIL only.
    """
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        if frame.f_code.co_filename in _ASKERS:
            frames.clear()
        frame = frame.f_back
    if _starts_a_process(frames):
        frames.pop()
    own = _first(frames, _is_own)
    if own is not None:
        # Drop the frames that started the user's code: the launcher, multiprocessing, or threading.
        while not _is_own(frames[-1].f_code.co_filename):
            frames.pop()
    else:
        own = _first(frames, lambda file: not is_ours(file))
    in_call = any(is_ours(frame.f_code.co_filename) for frame in frames[:own])
    place = None if own is None else _line(frames[own])
    if in_call and not shows_all_frames():
        del frames[:own]
    return Stack([_line(frame) for frame in frames[:_DEEPEST]][::-1], place, in_call)


def stack_of_error(error: BaseException) -> Stack:
    """Return the stack in which `error` was raised; see `stack_of`."""
    frames = [
        (frame.f_code.co_filename, f"{place_in(frame.f_code.co_filename, line)} in {frame.f_code.co_name}")
        for frame, line in walk_tb(user_frames(error))
    ]
    own = next((line for file, line in reversed(frames) if _is_own(file)), None)
    return Stack([line for _, line in frames[-_DEEPEST:]], own, False)


def _starts_a_process(frames: list[FrameType]) -> bool:
    """Return whether the outermost frame is the `python -c` of multiprocessing's start method "spawn"."""
    if len(frames) < 2:
        return False
    inner, outermost = (frame.f_code.co_filename for frame in frames[-2:])
    return outermost == "<string>" and inner.endswith(_SPAWN)


def _first(frames: list[FrameType], wanted: Callable[[str], bool]) -> int | None:
    return next((number for number, frame in enumerate(frames) if wanted(frame.f_code.co_filename)), None)


def _line(frame: FrameType) -> str:
    return f"{place_in(frame.f_code.co_filename, frame.f_lineno)} in {frame.f_code.co_name}"


def _is_own(file: str) -> bool:
    return not is_ours(file) and not _is_librarys(file)


def _is_librarys(file: str) -> bool:
    return "/lib/python3" in file or "/lib64/python3" in file or file.startswith("<frozen")
