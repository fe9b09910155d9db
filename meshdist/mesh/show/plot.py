"""A mesh as a matplotlib drawing."""

from __future__ import annotations

from typing import Any

from meshdist.mesh.show.colours import MINE, fill
from meshdist.mesh.show.grid import Cell, Grid


def as_plot(grid: Grid, ax: Any = None) -> Any:
    """Draw the grid into `ax`, new ones where it is None; return the matplotlib Axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "DeviceMesh.show: form='plot' needs matplotlib; pip install 'meshdist[notebook]', or use form='text'"
        ) from error
    rows, columns = len(grid.row_labels), len(grid.column_labels)
    if ax is None:
        width, height = 1.0 + 0.7 * columns, 1.2 + 0.7 * (rows + 1) * len(grid.panels)
        _, ax = pyplot.subplots(figsize=(max(width, 4.0), height), layout="constrained")
    for number, panel in enumerate(grid.panels):
        top = number * (rows + 1)
        if panel.title:
            ax.text(-0.6, top - 0.75, panel.title, ha="right", va="center", color="#444444")
        for column, label in enumerate(grid.column_labels):
            ax.text(column, top - 0.75, label, ha="center", va="center", color="#666666", fontsize="small")
        for row, (label, cells) in enumerate(zip(grid.row_labels, panel.rows, strict=True)):
            ax.text(-0.6, top + row, label, ha="right", va="center", color="#666666", fontsize="small")
            for column, cell in enumerate(cells):
                _draw(ax, cell, column, top + row)
    if grid.axis is None and len(grid.hosts) > 1:
        ax.legend(
            handles=[
                Patch(color=fill(k, None), label=f"{name} ({count})") for k, (name, count) in enumerate(grid.hosts)
            ],
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
        )
    ax.set_xlim(-1.6, columns - 0.4)
    ax.set_ylim(len(grid.panels) * (rows + 1) - 1.4, -1.2)
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.set_title("\n".join(filter(None, [grid.title, grid.groups_text, grid.left_out])), fontsize="small")
    return ax


def _draw(ax: Any, cell: Cell, column: int, row: int) -> None:
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
    ax.text(column, row, str(cell.rank), ha="center", va="center", color="black", fontweight=weight)
