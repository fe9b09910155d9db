"""Draw a mesh with matplotlib."""

from __future__ import annotations

import math
from typing import Any

from meshdist.mesh.show.grid import Cell, Grid, Panel
from meshdist.mesh.show.text import CUT, has_letters, legend_of_hosts, mark
from meshdist.system.palette import MINE, fill

# Inches: the size of a cell, the space above the cells, the width of a letter of the legend.
_CELL, _TITLE, _LETTER = 0.7, 0.9, 0.09
# In cells: the space for labels beside a panel, and above it including the gap.
_BESIDE, _ABOVE = 1.2, 1.0


def as_plot(grid: Grid, ax: Any = None) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "DeviceMesh.show: form='plot' needs matplotlib; pip install 'meshdist[notebook]', or use form='text'"
        ) from error
    legend = _legend(grid)
    across = panels_across(len(grid.panels), len(grid.row_labels) + _ABOVE, len(grid.column_labels) + _BESIDE)
    width = across * (len(grid.column_labels) + _BESIDE)
    height = math.ceil(len(grid.panels) / across) * (len(grid.row_labels) + _ABOVE)
    if ax is None:
        beside = 1.1 + _LETTER * max(map(len, legend.values())) if legend else 0.0
        size = (max(_CELL * width + beside, 4.0), _CELL * height + _TITLE)
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    for number, panel in enumerate(grid.panels):
        down, right = divmod(number, across)
        _draw_panel(
            ax, grid, panel, right * (len(grid.column_labels) + _BESIDE), down * (len(grid.row_labels) + _ABOVE)
        )
    if legend:
        _draw_legend(ax, legend)
    ax.set_xlim(-1.6, width - 1.6)
    ax.set_ylim(height - 1.2, -1.2)
    ax.set_aspect("equal")
    ax.set_axis_off()
    lines = [grid.title, grid.groups_text, grid.frame_text, grid.left_out]
    # Above the middle of the cells: the labels of the rows are all on the left.
    ax.set_title("\n".join(filter(None, lines)), fontsize="small", x=0.5 + 0.5 / width)
    return ax


def panels_across(count: int, height: float, width: float) -> int:
    return min(
        range(1, count + 1), key=lambda across: abs(math.log(across * width / (math.ceil(count / across) * height)))
    )


def _legend(grid: Grid) -> dict[int | None, str]:
    """Return the lines of the legend by host number, None for the remaining hosts; empty if groups are shown."""
    if grid.axis is not None or grid.num_hosts < 2:
        return {}
    named, more = legend_of_hosts(grid)
    lettered = has_letters(grid)
    lines: dict[int | None, str] = {
        number: f"{mark(number)} {label}" if lettered else label for number, label in named.items()
    }
    return {**lines, None: more} if more else lines


def _draw_legend(ax: Any, legend: dict[int | None, str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor="none" if number is None else fill(number, None), label=label)
        for number, label in legend.items()
    ]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")


def _draw_panel(ax: Any, grid: Grid, panel: Panel, left: float, top: float) -> None:
    def write(x: float, y: float, text: str, side: str = "center", **how: Any) -> None:
        ax.text(left + x, top + y, text, ha=side, va="center", **how)

    pale = {"color": "#666666", "fontsize": "small"}
    lettered = has_letters(grid)
    if panel.title:
        write(-0.8 if grid.columns.is_cut_before else -0.6, -0.75, panel.title, "right", color="#444444")
    if grid.columns.is_cut_before:
        write(-0.65, -0.75, CUT, **pale)
    if grid.columns.is_cut_after:
        write(len(grid.column_labels) - 0.4, -0.75, CUT, **pale)
    if grid.rows.is_cut_before:
        write(-0.6, -0.45, CUT, "right", **pale)
    if grid.rows.is_cut_after:
        write(-0.6, len(grid.row_labels) - 0.55, CUT, "right", **pale)
    for column, label in enumerate(grid.column_labels):
        write(column, -0.75, label, **pale)
    for row, (label, cells) in enumerate(zip(grid.row_labels, panel.rows, strict=True)):
        write(-0.6, row, label, "right", **pale)
        for column, cell in enumerate(cells):
            _draw(ax, cell, left + column, top + row)
            if lettered and cell.host is not None:
                write(column + 0.42, row + 0.32, mark(cell.host), "right", color="black", fontsize="x-small")


def _draw(ax: Any, cell: Cell, column: float, row: float) -> None:
    from matplotlib.patches import Rectangle

    marked = cell.is_mine or cell.is_with_me
    ax.add_patch(
        Rectangle(
            (column - 0.46, row - 0.46),
            0.92,
            0.92,
            facecolor=fill(cell.host, cell.group),
            edgecolor=MINE if marked else "white",
            linewidth=2.5 if marked else 1.0,
        )
    )
    weight = "bold" if cell.is_mine else "normal"
    size = "medium" if cell.rank < 10_000 else "small"
    ax.text(column, row, str(cell.rank), ha="center", va="center", color="black", fontweight=weight, fontsize=size)
