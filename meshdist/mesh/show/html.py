"""A mesh as an HTML table, for notebooks."""

from __future__ import annotations

from html import escape

from meshdist.mesh.show.colours import MINE, fill
from meshdist.mesh.show.grid import Cell, Grid, Panel

_TABLE = "border-collapse:collapse;display:inline-table;margin:0 1.5em 0.5em 0;font-variant-numeric:tabular-nums"
_HEAD = "padding:2px 6px;font-weight:normal;color:#666;text-align:center"


def as_html(grid: Grid) -> str:
    """Return the grid as HTML: a table for each panel, coloured by host or by group; hovering a rank says which."""
    legend = "".join(f"<div>{escape(line)}</div>" for line in (grid.groups_text, grid.left_out) if line)
    tables = "".join(_table(grid, panel) for panel in grid.panels)
    swatches = "" if grid.axis else "".join(_swatch(k, *host) for k, host in enumerate(grid.hosts))
    return f"<div><div><b>{escape(grid.title)}</b></div>{tables}<div>{swatches}</div>{legend}</div>"


def _table(grid: Grid, panel: Panel) -> str:
    heads = "".join(f'<th style="{_HEAD}">{escape(label)}</th>' for label in grid.column_labels)
    lines = [f'<tr><th style="{_HEAD}">{escape(panel.title)}</th>{heads}</tr>']
    for label, row in zip(grid.row_labels, panel.rows, strict=True):
        lines.append(f'<tr><th style="{_HEAD}">{escape(label)}</th>{"".join(_cell(grid, cell) for cell in row)}</tr>')
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'


def _cell(grid: Grid, cell: Cell) -> str:
    border = f"3px solid {MINE}" if cell.is_mine or cell.is_with_me else "1px solid #fff"
    weight = "bold" if cell.is_mine else "normal"
    style = (
        f"background:{fill(cell.host, cell.group)};color:#000;border:{border};padding:4px 10px;"
        f"text-align:center;font-weight:{weight}"
    )
    about = [f"rank {cell.rank}"]
    if cell.host is not None:
        about.append(f"on {grid.hosts[cell.host][0]}")
    if cell.group is not None:
        about.append(f"group {cell.group} along {grid.axis}")
    return f'<td style="{style}" title="{escape(", ".join(about))}">{cell.rank}</td>'


def _swatch(number: int, name: str, count: int) -> str:
    style = f"background:{fill(number, None)};color:#000;padding:1px 8px;margin-right:6px"
    return f'<span style="{style}">{escape(name)} ({count})</span>'
