"""The width of the terminal, and lines folded to fit it."""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from textwrap import wrap


def terminal_width() -> int:
    """Return how many characters fit on a line of stdout if that is a terminal, or COLUMNS of it; 0 for any number.

    A file, a pipe and a stream that replaces stdout, as in a notebook, have no width.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return get_terminal_size((0, 0)).columns if is_terminal else 0


def fold(text: str, width: int, hanging: int | None = None) -> str:
    """Return the text with each line that is wider than `width` folded between words; 0 folds none.

    Words are not broken, so that paths and options can be copied. The folded parts of a line begin after `hanging`
    spaces, or two more than the line itself if it is None.

    Example:
        >>> print(fold("  rank 1 is in all_reduce", 16))
          rank 1 is in
            all_reduce
    """
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width, hanging))


def _folded(line: str, width: int, hanging: int | None) -> list[str]:
    if width <= 0 or len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip()) + 2 if hanging is None else hanging
    return wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
