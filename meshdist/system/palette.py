"""The colours of hosts, groups and ranks, the same in HTML and in plots."""

from __future__ import annotations

# Light enough for black digits, and distinct for readers with red-green colour blindness.
# Source: P. Tol, "Colour schemes" (2021), the scheme "light"; violet instead of its olive, which is close to its pear.
# The two blues are far apart, so that few calls or ranks do not get both.
_FILLS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#44bb99", "#bbcc33", "#9988ee", "#99ddff", "#dddddd")
# Of what belongs to none of them, or to several.
PLAIN = "#f2f2f2"
# Of all cells of a mesh on one host.
ONE_HOST = "#e4e4e4"

MINE = "#aa3377"

NUM_COLOURS = len(_FILLS)


def fill(host: int | None, group: int | None) -> str:
    """Return the colour of a cell: that of its group if groups are shown, else that of its host."""
    number = host if group is None else group
    return PLAIN if number is None else _FILLS[number % len(_FILLS)]
