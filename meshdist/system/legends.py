"""Legends of plots over time, which fill their Axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of their width, what is left of Axes beside a wide legend.
_LEAST_WIDTH = 0.3


def legend_beside(ax: Any, handles: Sequence[Any]) -> None:
    """Write a legend to the right of Axes, which get narrower if it would leave the figure."""
    where = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    legend = ax.legend(handles=handles, frameon=False, fontsize="small", **where)
    ax.figure.canvas.figure.draw_without_rendering()  # a layout engine makes room for it
    beyond = legend.get_window_extent().x1 - ax.figure.bbox.x1
    if beyond > 0:
        box = ax.get_position()
        width = max(box.width - beyond / ax.figure.bbox.width, _LEAST_WIDTH * box.width)
        ax.set_position((box.x0, box.y0, width, box.height))
