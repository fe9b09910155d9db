"""The traceback of an exception as its user needs it: without the frames of this package below the call that failed.

This holds for what the package raises on purpose: a DistError, or one of Python's errors about arguments, names, files
and missing libraries. It keeps any other exception as it is, which may be a mistake of the package, and so does debug
level DETAIL.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dis import opmap
from functools import wraps
from io import StringIO
from types import TracebackType
from typing import ParamSpec, TypeVar

from meshdist.debug.debug_level import shows_all_frames
from meshdist.errors import DistError
from meshdist.runtime.call_site import is_ours
from meshdist.system.name_hints import explain, named_as, never_began

P = ParamSpec("P")
R = TypeVar("R")

_RAISE = opmap["RAISE_VARARGS"]
_SUGGESTION = re.compile(r"(.*)\. Did you mean: '.*'\?")
_OF_PYTHON = (ValueError, TypeError, AttributeError, ImportError, OSError)
DELIBERATE = (DistError, *_OF_PYTHON)
"""What this package raises on purpose; other code raises some of these, too."""


def ending_at_the_call(function: Callable[P, R]) -> Callable[P, R]:
    """Have the traceback of an error that `function` raises on purpose end where it was called; a decorator.

    So does that of Ctrl-C. That of an error in the user's code goes on there. For the functions that start ranks or a
    world, which may fail where no launcher shortens the traceback. A TypeError says which argument was meant, as with
    `explaining`.
    """

    @wraps(function)
    def ending(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, TypeError):
                explain(function, error)
            is_expected = isinstance(error, KeyboardInterrupt) or is_deliberate(error, error.__traceback__)
            is_expected = is_expected or (isinstance(error, TypeError) and never_began(error))
            kept = None if is_expected else without_leading(error.__traceback__)
            if shows_all_frames() or (kept is None and not is_expected):
                raise
            error.__traceback__ = kept
            # The traceback shows this line in any case.
            raise error  # MESHDIST_DEBUG=DETAIL shows the frames of meshdist

    return named_as(function, ending)


def traceback_text(error: BaseException, frames: TracebackType | None) -> str:
    """Return an exception as Python prints it, with its causes, from `frames` on: its traceback or a part of it."""
    described = traceback.TracebackException(type(error), error, frames)
    hides_frames = not shows_all_frames()
    suggestions: dict[str, str] = {}
    for part, cause, trace in _chain(described, error, frames):
        if hides_frames and is_deliberate(cause, trace):
            kept = [frame for frame in part.stack if not is_ours(frame.filename)]
            if kept:  # else it was raised on a thread of this package
                part.stack = traceback.StackSummary.from_list(kept)
        if isinstance(cause, (NameError, AttributeError)):
            suggestions = suggestions or _suggestions(error)
    return "".join(suggestions.get(line, line) for line in "".join(described.format()).splitlines(keepends=True))


def _suggestions(error: BaseException) -> dict[str, str]:
    """Return the lines of an error, or of its causes, as they are with the name that Python suggests.

    Up to Python 3.11, only the interpreter looks for such names, when it prints an error.
    """
    if sys.version_info >= (3, 12):
        return {}
    with redirect_stderr(_Printed()) as printed:
        sys.__excepthook__(type(error), error, error.__traceback__)
    found = (_SUGGESTION.fullmatch(line) for line in printed.getvalue().splitlines())
    return {f"{match[1]}\n": f"{match[0]}\n" for match in found if match is not None}


class _Printed(StringIO):
    """What the thread that makes this prints to stderr; what others print goes there."""

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._stderr = threading.get_ident(), sys.stderr

    def write(self, text: str) -> int:
        return super().write(text) if threading.get_ident() == self._thread else self._stderr.write(text)


def without_leading(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame on that is not of this package; None if there is none."""
    while frames is not None and is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception without the frames of this package around the user's code, and below it.

    None if that leaves no frames.
    """
    frames = without_leading(error.__traceback__)
    if shows_all_frames():
        return error.__traceback__
    if frames is None:  # the user's code was not reached
        return None if is_deliberate(error, error.__traceback__) else error.__traceback__
    kept = []
    link: TracebackType | None = frames
    hides_ours = is_deliberate(error, frames)
    while link is not None:
        if not (hides_ours and is_ours(link.tb_frame.f_code.co_filename)):
            kept.append(link)
        link = link.tb_next
    copied: TracebackType | None = None
    for each in reversed(kept):
        copied = TracebackType(copied, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return copied


def _chain(
    described: traceback.TracebackException, error: BaseException, frames: TracebackType | None
) -> Iterator[tuple[traceback.TracebackException, BaseException, TracebackType | None]]:
    """Yield the exception and those that it comes from, as described and as they are; those in groups are left out."""
    found = [(described, error, frames)]
    while found:
        part, cause, trace = found.pop()
        yield part, cause, trace
        for further, other in ((part.__cause__, cause.__cause__), (part.__context__, cause.__context__)):
            if further is not None and other is not None:  # a loop ends with None in the description
                found.append((further, other, other.__traceback__))


def is_deliberate(error: BaseException, frames: TracebackType | None) -> bool:
    """Return whether this package raised `error` on purpose."""
    if frames is None:
        return False
    while frames.tb_next is not None:
        frames = frames.tb_next
    code = frames.tb_frame.f_code
    if not is_ours(code.co_filename):
        return False
    if isinstance(error, DistError):
        return True
    # An error of NumPy or of the interpreter, such as that of None + 1, comes from another instruction.
    return isinstance(error, _OF_PYTHON) and code.co_code[frames.tb_lasti] == _RAISE
