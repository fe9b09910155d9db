"""Draw a mesh as text, and the legends of all drawings."""

from __future__ import annotations

from string import ascii_lowercase

from meshdist.mesh.show.grid import Cell, Grid
from meshdist.system.drawing_style import NUM_COLOURS
from meshdist.system.terminal import fold

# Marks omitted rows or columns.
CUT = "…"
MOST_NAMED = 12
# So many fit on a line, with a part of a mesh.
_NAMED_OF_A_PART = 2


def mark(number: int) -> str:
    before, last = divmod(number, len(ascii_lowercase))
    return (mark(before - 1) if before else "") + ascii_lowercase[last]


def has_letters(grid: Grid) -> bool:
    """Return whether coloured drawings also need letters: there are more hosts than colours."""
    return grid.axis is None and len(grid.hosts) > NUM_COLOURS


def legend_of_hosts(grid: Grid, most: int = MOST_NAMED, *, in_words: bool = True) -> tuple[dict[int, str], str]:
    """Return the first visible hosts by number, each with its number of ranks, and how many hosts remain.

    With `in_words`, the number has its noun: `node0 (4 ranks)`. The calling rank's host takes the last place if it is
    not among the first ones.
    """
    numbers = list(range(min(most, len(grid.hosts))))
    if grid.my_host is not None and grid.my_host not in numbers:
        numbers[-1] = grid.my_host
    named = {}
    for number in numbers:
        name, count = grid.hosts[number]
        noun = (" rank" if count == 1 else " ranks") if in_words else ""
        named[number] = f"{name} ({count}{noun})"
    left = grid.num_hosts - len(named)
    return named, f"and {left:,} more" if left else ""


def as_text(grid: Grid, width: int = 0) -> str:
    """Return the grid as lines of text, which are folded to fit a terminal of `width` characters; 0 folds none.

    The calling rank is in square brackets, the ranks of its group along the shown axis in round ones. If the mesh spans
    several hosts, letters after each rank name its host.
    """
    lines = [fold(f"{grid.name}, {grid.place}" if grid.place else grid.name, width)]
    marked = grid.num_hosts > 1
    cells = [[[_cell(cell, marked) for cell in row] for row in panel.rows] for panel in grid.panels]
    cell = max(len(text) for panel in cells for row in panel for text in row)
    cell = max(cell, *map(len, grid.column_labels))
    margin = max(map(len, grid.row_labels)) + 2
    before = CUT + " " if grid.columns.is_cut_before else ""
    after = " " + CUT if grid.columns.is_cut_after else ""
    num_columns = len(grid.column_labels)
    most = max(1, (width - margin - len(before) - len(after)) // (cell + 1)) if width else num_columns
    for panel, rows in zip(grid.panels, cells, strict=True):
        for first in range(0, num_columns, most):
            part = slice(first, first + most)
            head = panel.title.ljust(margin) if panel.title else " " * margin
            labels = " ".join(label.rjust(cell) for label in grid.column_labels[part])
            head += " " * len(before) if first else before
            lines += ["", (head + labels + after * (first + most >= num_columns)).rstrip()]
            lines += [CUT.rjust(margin - 1)] * grid.rows.is_cut_before
            for label, row in zip(grid.row_labels, rows, strict=True):
                texts = " ".join(text.rjust(cell) for text in row[part])
                lines.append((label.rjust(margin - 1) + " " + " " * len(before) + texts).rstrip())
            lines += [CUT.rjust(margin - 1)] * grid.rows.is_cut_after
    return "\n".join([*lines, "", *(fold(line, width) for line in _legend(grid))]).rstrip()


def _cell(cell: Cell, marked: bool) -> str:
    host = mark(cell.host) if marked and cell.host is not None else ""
    if cell.is_mine:
        return f"[{cell.rank}{host}]"
    # The space aligns the digits of a column.
    return f"({cell.rank}{host})" if cell.is_with_me else f"{cell.rank}{host} "


def _legend(grid: Grid) -> list[str]:
    marked = "; this rank's group is highlighted" if grid.frame_text else ""
    lines = [line for line in (grid.left_out, grid.groups_text and grid.groups_text + marked) if line]
    if grid.num_hosts == 1:
        lines.append(f"all ranks on {grid.hosts[0][0]}")
    elif grid.hosts:
        named, more = legend_of_hosts(grid, _NAMED_OF_A_PART if grid.left_out else MOST_NAMED, in_words=False)
        names = ", ".join(f"{mark(number)} {label}" for number, label in named.items())
        lines.append(f"hosts (ranks): {names}{f', {more}' if more else ''}")
    return lines
