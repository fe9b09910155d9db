"""Draw a mesh with matplotlib."""

from __future__ import annotations

import math
from typing import Any

from meshdist.mesh.show.grid import Cell, Grid, Panel
from meshdist.mesh.show.legend import frame, legend_below, title_above, width_in_of
from meshdist.mesh.show.text import CUT, has_letters, legend_of_hosts, mark
from meshdist.system.palette import MINE, fill

# Inches: the size of a cell, and the space of the title and of a line of the legend.
_CELL, _TITLE, _LINE = 0.7, 0.4, 0.2
_MARGIN = 0.15  # above and below all
# In cells: the gap beside a panel, the width of a letter of its labels, and the space above it including the labels.
_GAP, _LETTER, _ABOVE = 0.3, 0.11, 0.75
# In cells, from the middle of a row of cells to that of the labels above.
_TO_LABELS = 0.65
# The space above the labels of the first row, and below the last one.
_TOP, _BOTTOM = 0.2, 0.15
# Panels are arranged in a shape close to this width by height, with few empty places.
_ASPECT, _EMPTY = 1.5, 2.5
# Text below fewer cells has the width of so many.
_LEAST_ACROSS = 4


def as_plot(grid: Grid, ax: Any = None) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "DeviceMesh.show: form='plot' needs matplotlib; pip install matplotlib, or use form='text'"
        ) from error
    entries = _entries(grid)
    num_rows, num_columns = len(grid.row_labels), len(grid.column_labels)
    letters = max(map(len, [*grid.row_labels, *(panel.title for panel in grid.panels)]))
    beside = _GAP + _LETTER * letters
    across = panels_across(len(grid.panels), num_rows + _ABOVE, num_columns + beside)
    width = across * (num_columns + beside)
    down = math.ceil(len(grid.panels) / across)
    top, bottom = -_TO_LABELS - _TOP, down * (num_rows + _ABOVE) - _ABOVE - 0.5 + _BOTTOM
    cells = max(width - beside, _LEAST_ACROSS)
    is_own = ax is None
    if is_own:
        lines = len(entries) + len(grid.notes) + 1
        wider = (cells + beside - width) / 2  # how far the text reaches beyond the cells on each side
        size = (_CELL * (cells - wider + max(beside, wider) + _GAP), _CELL * (bottom - top) + _TITLE + _LINE * lines)
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
        width_in = _CELL * cells
    else:
        width_in = width_in_of(ax)
    for number, panel in enumerate(grid.panels):
        row, column = divmod(number, across)
        _draw_panel(ax, grid, panel, column * (num_columns + beside), row * (num_rows + _ABOVE))
    ax.set_xlim(-0.5 - beside, width - 0.5 - beside)
    ax.set_ylim(bottom, top)
    ax.set_aspect("equal")
    ax.set_axis_off()
    # Above and below the middle of the cells: the labels of the rows are all on the left.
    middle = (width - beside - 1) / 2
    title_above(ax, grid.headline, middle, width_in)
    legend_below(ax, entries, grid.notes, middle, width_in)
    if is_own:  # the columns of the legend decide its height
        ax.figure.draw_without_rendering()
        # In whole tenths: text is not equally high with all versions of matplotlib.
        height_in = math.ceil(10 * (ax.figure.get_tightbbox().height + _MARGIN)) / 10
        ax.figure.set_figheight(min(height_in, ax.figure.get_figheight()))
    return ax


def panels_across(count: int, height: float, width: float) -> int:
    def cost(across: int) -> float:
        down = math.ceil(count / across)
        empty = across * down - count
        return abs(math.log(across * width / (down * height) / _ASPECT)) + _EMPTY * empty / count

    return min(range(1, count + 1), key=cost)


def _entries(grid: Grid) -> list[Any]:
    """Return the entries of the legend: the hosts of the mesh, unless groups are shown, and the frame."""
    from matplotlib.patches import Patch

    entries: list[Any] = []
    if grid.axis is None and grid.num_hosts > 1:
        named, more = legend_of_hosts(grid)
        letters = {number: f"{mark(number)} " if has_letters(grid) else "" for number in named}
        entries = [Patch(facecolor=fill(n, None), label=f"{letters[n]}{label}") for n, label in named.items()]
        entries += [Patch(facecolor="none", label=more)] if more else []
    return [*entries, frame(grid.frame_text)] if grid.frame_text else entries


def _draw_panel(ax: Any, grid: Grid, panel: Panel, left: float, top: float) -> None:
    def write(x: float, y: float, text: str, side: str = "center", **how: Any) -> None:
        ax.text(left + x, top + y, text, ha=side, va="center", **how)

    pale = {"color": "#666666", "fontsize": "small"}
    lettered = has_letters(grid)
    if panel.title:
        write(-0.8 if grid.columns.is_cut_before else -0.6, -_TO_LABELS, panel.title, "right", color="#444444")
    if grid.columns.is_cut_before:
        write(-0.65, -_TO_LABELS, CUT, **pale)
    if grid.columns.is_cut_after:
        write(len(grid.column_labels) - 0.4, -_TO_LABELS, CUT, **pale)
    if grid.rows.is_cut_before:
        write(-0.6, -0.45, CUT, "right", **pale)
    if grid.rows.is_cut_after:
        write(-0.6, len(grid.row_labels) - 0.55, CUT, "right", **pale)
    for column, label in enumerate(grid.column_labels):
        write(column, -_TO_LABELS, label, **pale)
    for row, (label, cells) in enumerate(zip(grid.row_labels, panel.rows, strict=True)):
        write(-0.6, row, label, "right", **pale)
        for column, cell in enumerate(cells):
            _draw(ax, cell, grid.fill(cell), left + column, top + row)
            if lettered and cell.host is not None:
                write(column + 0.42, row + 0.32, mark(cell.host), "right", color="black", fontsize="x-small")


def _draw(ax: Any, cell: Cell, colour: str, column: float, row: float) -> None:
    from matplotlib.patches import Rectangle

    marked = cell.is_mine or cell.is_with_me
    ax.add_patch(
        Rectangle(
            (column - 0.46, row - 0.46),
            0.92,
            0.92,
            facecolor=colour,
            edgecolor=MINE if marked else "white",
            linewidth=2.5 if marked else 1.0,
        )
    )
    weight = "bold" if cell.is_mine else "normal"
    size = "medium" if cell.rank < 10_000 else "small"
    ax.text(column, row, str(cell.rank), ha="center", va="center", color="black", fontweight=weight, fontsize=size)
