"""A mesh as text."""

from __future__ import annotations

from string import ascii_lowercase

from meshdist.mesh.show.grid import Cell, Grid

# More hosts than letters are numbered in the legend and not marked in the cells.
_MOST_HOSTS = len(ascii_lowercase)


def as_text(grid: Grid) -> str:
    """Return the grid as lines of text.

    The calling rank stands in square brackets, the ranks of its group along the axis that is shown in round ones. Where
    the mesh spans several hosts a letter behind each rank says which it is on.
    """
    lines = [grid.title]
    marked = 1 < len(grid.hosts) <= _MOST_HOSTS
    cells = [[[_cell(cell, marked) for cell in row] for row in panel.rows] for panel in grid.panels]
    width = max(len(text) for panel in cells for row in panel for text in row)
    width = max(width, *map(len, grid.column_labels))
    margin = max(map(len, grid.row_labels)) + 2
    for panel, rows in zip(grid.panels, cells, strict=True):
        head = panel.title.ljust(margin) if panel.title else " " * margin
        lines += ["", (head + " ".join(label.rjust(width) for label in grid.column_labels)).rstrip()]
        for label, row in zip(grid.row_labels, rows, strict=True):
            lines.append((label.rjust(margin - 1) + " " + " ".join(text.rjust(width) for text in row)).rstrip())
    return "\n".join([*lines, "", *_legend(grid, marked)]).rstrip()


def _cell(cell: Cell, marked: bool) -> str:
    host = ascii_lowercase[cell.host] if marked and cell.host is not None else ""
    if cell.is_mine:
        return f"[{cell.rank}{host}]"
    # The space keeps the digits of a column under each other.
    return f"({cell.rank}{host})" if cell.is_with_me else f"{cell.rank}{host} "


def _legend(grid: Grid, marked: bool) -> list[str]:
    lines = []
    if grid.left_out:
        lines.append(grid.left_out)
    if grid.groups_text:
        lines.append(grid.groups_text)
    if marked:
        names = ", ".join(f"{ascii_lowercase[k]} {name} ({count})" for k, (name, count) in enumerate(grid.hosts))
        lines.append(f"hosts (ranks): {names}")
    elif len(grid.hosts) == 1:
        lines.append(f"all ranks on {grid.hosts[0][0]}")
    elif grid.hosts:
        lines.append(f"{len(grid.hosts)} hosts")
    return lines
