"""Draw a mesh with matplotlib."""

from __future__ import annotations

import math
from typing import Any

from meshdist.mesh.show.grid import Cell, Grid, Panel
from meshdist.mesh.show.text import CUT, has_letters, legend_of_hosts, mark
from meshdist.mesh.show.words import Extent, Scale, Words, axes_around, box_of, frame, small_pt, text_width_in
from meshdist.system.drawing_style import MINE, fill

# Of a cell: in a figure of our own, and in given Axes, where smaller cells have smaller texts.
_CELL_IN, _LEAST_CELL_IN = 0.7, 0.4
# In cells: the space around the labels of a row, and from the middle of a row of cells to that of the labels above, and
# to the dots for further rows above or below.
_GAP, _TO_LABELS, _TO_CUT = 0.3, 0.65, 0.34
# In cells: between panels, one below the other; above the labels of the first row; below the last row.
_BETWEEN, _TOP, _BOTTOM = 1.0, 0.2, 0.15
# In a figure of our own, panels are arranged in a shape close to this width by height, with few empty places.
_ASPECT, _EMPTY = 1.5, 2.5
# Text below fewer cells has the width of so many.
_LEAST_ACROSS = 4


def as_plot(grid: Grid, ax: Any = None) -> Any:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "DeviceMesh.show: form='plot' needs matplotlib; pip install matplotlib, or use form='text'"
        ) from error
    cell_in = _CELL_IN if ax is None else _LEAST_CELL_IN
    num_rows = len(grid.row_labels)
    widest_in = max(text_width_in(label, small_pt()) for label in grid.column_labels)
    cell_width = max(1.0, widest_in / cell_in + _GAP)
    width = cell_width * len(grid.column_labels)
    titles = max(text_width_in(panel.title, small_pt(), "bold") for panel in grid.panels)
    labels_in = max(titles, *(text_width_in(label, small_pt()) for label in grid.row_labels))
    beside = labels_in / cell_in + 2 * _GAP
    aspect = _ASPECT if ax is None else box_of(ax).width / box_of(ax).height
    across = panels_across(len(grid.panels), num_rows + _BETWEEN, width + beside, aspect)
    down = math.ceil(len(grid.panels) / across)
    # From the left of the first cell on.
    right, bottom = across * (width + beside) - beside, down * (num_rows + _BETWEEN) - _BETWEEN - 0.5
    extent = Extent(-beside, right + beside, -_TO_LABELS - _TOP, bottom + _BOTTOM)
    words = Words(grid.headline, _entries(grid), grid.notes)
    ax, scale = axes_around(extent, cell_in, words, cell_in * max(right, _LEAST_ACROSS), ax)
    for number, panel in enumerate(grid.panels):
        row, column = divmod(number, across)
        _draw_panel(ax, grid, panel, column * (width + beside), row * (num_rows + _BETWEEN), cell_width, scale)
    return ax


def panels_across(count: int, height: float, width: float, aspect: float) -> int:
    """Return how many panels of this size to draw side by side, for a picture of about this width by height."""

    def cost(across: int) -> float:
        down = math.ceil(count / across)
        empty = across * down - count
        return abs(math.log(across * width / (down * height) / aspect)) + _EMPTY * empty / count

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


def _draw_panel(ax: Any, grid: Grid, panel: Panel, left: float, top: float, cell_width: float, scale: Scale) -> None:
    def write(x: float, y: float, text: str, side: str = "center", **how: Any) -> None:
        ax.text(left + x, top + y, text, ha=side, va="center", **{"fontsize": scale.label_pt, **how})

    pale = {"color": "#666666"}
    lettered = has_letters(grid)
    right = cell_width * len(grid.column_labels)
    if panel.title:
        end = -_GAP - 0.08 if grid.columns.is_cut_before else -0.1
        write(end, -_TO_LABELS, panel.title, "right", fontweight="bold")
    if grid.columns.is_cut_before:
        write(-0.1, -_TO_LABELS, CUT, "right", **pale)
    if grid.columns.is_cut_after:
        write(right + 0.1, -_TO_LABELS, CUT, "left", **pale)
    if grid.rows.is_cut_before:
        write(-_GAP, -_TO_CUT, CUT, "right", **pale)
    if grid.rows.is_cut_after:
        write(-_GAP, len(grid.row_labels) - 1 + _TO_CUT, CUT, "right", **pale)
    for column, label in enumerate(grid.column_labels):
        write((column + 0.5) * cell_width, -_TO_LABELS, label, **pale)
    for row, (label, cells) in enumerate(zip(grid.row_labels, panel.rows, strict=True)):
        write(-0.1, row, label, "right", **pale)
        for column, cell in enumerate(cells):
            x, y = left + column * cell_width, top + row
            _draw(ax, cell, grid.fill(cell), x, y, cell_width, scale, 0.75 if lettered else 1.0)
            if lettered and cell.host is not None:
                letter = mark(cell.host)
                size = scale.number_pt(letter, 0.3, 0.2)
                write((column + 1) * cell_width - 0.08, row + 0.34, letter, "right", color="black", fontsize=size)


def _draw(
    ax: Any, cell: Cell, colour: str, left: float, middle: float, width: float, scale: Scale, height: float
) -> None:
    """Draw a cell; its number has this height, beside which there is room for a letter."""
    from matplotlib.patches import Rectangle

    marked = cell.is_mine or cell.is_with_me
    edge: dict[str, Any] = {
        "edgecolor": MINE if marked else "white",
        "linewidth": scale.frame_pt if marked else 1.0,
    }
    ax.add_patch(Rectangle((left + 0.04, middle - 0.46), width - 0.08, 0.92, facecolor=colour, **edge))
    ax.text(
        left + width / 2,
        middle,
        str(cell.rank),
        ha="center",
        va="center",
        color="black",
        fontweight="bold" if cell.is_mine else "normal",
        fontsize=scale.number_pt(str(cell.rank), width, height),
    )
