"""The look of drawings: the colours of hosts, groups and ranks, the same in HTML and in plots, and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Light enough for black digits, and distinct for readers with red-green colour blindness.
# Source: P. Tol, "Colour schemes" (2021), the scheme "light"; violet instead of its olive, which is close to its pear.
# The two blues are far apart, so that few calls or ranks do not get both.
_FILLS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#44bb99", "#bbcc33", "#9988ee", "#99ddff", "#dddddd")
# Of what belongs to none of them, or to several.
PLAIN = "#f2f2f2"
# Of all cells of a mesh on one host.
ONE_HOST = "#e4e4e4"

MINE = "#aa3377"

PLOT_FORMATS = (".png", ".svg", ".pdf")
"""The ends of the names of files into which command lines draw."""

NUM_COLOURS = len(_FILLS)
# Of their width, what is left of Axes beside a wide legend.
_LEAST_WIDTH = 0.3


def fill(host: int | None, group: int | None) -> str:
    """Return the colour of a cell: that of its group if groups are shown, else that of its host."""
    number = host if group is None else group
    return PLAIN if number is None else _FILLS[number % len(_FILLS)]


def legend_beside(ax: Any, handles: Sequence[Any]) -> None:
    """Write a legend to the right of Axes that a plot fills; they get narrower if it would leave the figure."""
    where = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    legend = ax.legend(handles=handles, frameon=False, fontsize="small", **where)
    ax.figure.canvas.figure.draw_without_rendering()  # a layout engine makes room for it
    beyond = legend.get_window_extent().x1 - ax.figure.bbox.x1
    if beyond > 0:
        box = ax.get_position()
        width = max(box.width - beyond / ax.figure.bbox.width, _LEAST_WIDTH * box.width)
        ax.set_position((box.x0, box.y0, width, box.height))
