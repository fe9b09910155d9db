"""Find the line of the user's code that made a call."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from functools import cache
from types import CodeType, FrameType

from meshdist.runtime.work import carried

# This package, and the module that calls it at the end of a `with` block.
_NOT_THE_USERS = (os.path.dirname(os.path.dirname(__file__)), contextlib.__file__)
# What calls this package: torch.distributed and the collectives of Ray as a backend, and autograd's primitives.
_CALLERS = tuple(
    os.path.join("site-packages", *parts, "") for parts in (("torch",), ("ray", "util", "collective"), ("autograd",))
)


def user_frame() -> tuple[FrameType | None, int]:
    """Return the innermost frame outside this package and its distance from the caller's; None in a package thread."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
        depth += 1
    if frame is None or frame.f_code.co_filename == threading.__file__:
        return None, depth
    return frame, depth


def call_site() -> str:
    """Return `file:line` of the user's call, also where another thread, or a later wait, carries it out."""
    if carried.place is not None:
        code, instruction = carried.place
        if code.co_filename != threading.__file__:  # a thread of this package made the call
            return _file_and_line(code, line_of(code, instruction))
    frame, _ = user_frame()
    return "an async call" if frame is None else _file_and_line(frame.f_code, frame.f_lineno)


def call_chain(most_callers: int) -> str:
    """Return `call_site()` and the lines of up to `most_callers` callers; an async call has its own line alone."""
    site = call_site()
    frame = user_frame()[0] if carried.place is None else None
    callers: list[str] = []
    # What this package calls, as a rank's main function, begins the user's part of the stack.
    while frame is not None and (frame := frame.f_back) is not None and len(callers) < most_callers:
        if frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            break
        callers.append(_file_and_line(frame.f_code, frame.f_lineno))
    return f"{site}, called from {', '.join(callers)}" if callers else site


def line_of(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction; a frame has the instruction as `f_lasti`."""
    lines = (line for begin, end, line in code.co_lines() if begin <= instruction < end and line is not None)
    return next(lines, code.co_firstlineno)


@cache
def is_ours(file: str) -> bool:
    """Return whether a source file belongs to this package, or to a library that calls it."""
    return file.startswith(_NOT_THE_USERS) or any(caller in file for caller in _CALLERS)


def _file_and_line(code: CodeType, line: int) -> str:
    return os.path.basename(place_in(code.co_filename, line))


def place_in(file: str, line: int) -> str:
    """Return `file:line`, or `In [5], line 2` for a cell of a notebook."""
    cell = _cell(file)
    return f"{file}:{line}" if cell is None else f"{cell}, line {line}"


def _cell(file: str) -> str | None:
    """Return the name of the cell of a notebook that is compiled as `file`, as `In [5]`; None for a file."""
    if file.startswith("In ["):  # a cell of workers
        return file
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return None
    name_of = getattr(shell.compile, "format_code_name", None)
    found = None if name_of is None else name_of(file)  # ("Cell", "In[5]")
    return None if found is None else str(found[1]).replace("In[", "In [")


def warn_not_member(name: str) -> None:
    """Warn, at the user's line, that a non-member's call of `name` does nothing."""
    _, depth = user_frame()
    warnings.warn(f"{name} on a group that this rank is not in does nothing", stacklevel=depth + 1)
