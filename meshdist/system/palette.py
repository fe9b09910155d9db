"""The colours of hosts, groups and ranks, the same in HTML and in plots."""

from __future__ import annotations

# Light enough for black digits, and distinct for readers with red-green colour blindness.
# Source: P. Tol, "Colour schemes" (2021), the schemes "light" and "pale".
_FILLS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00", "#dddddd")
# Of what belongs to none of them, or to several.
PLAIN = "#f2f2f2"

MINE = "#aa3377"

NUM_COLOURS = len(_FILLS)


def fill(host: int | None, group: int | None) -> str:
    """Return the colour of a cell: that of its group if groups are shown, else that of its host."""
    number = host if group is None else group
    return PLAIN if number is None else _FILLS[number % len(_FILLS)]
