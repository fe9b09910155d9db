"""Draw a mesh as an HTML table, for notebooks."""

from __future__ import annotations

from html import escape

from meshdist.mesh.show.grid import Cell, Grid, Panel
from meshdist.mesh.show.text import CUT, has_letters, legend_of_hosts, mark
from meshdist.system.drawing_style import MINE, fill

_TABLE = "border-collapse:collapse;display:inline-table;margin:0 1.5em 0.5em 0;font-variant-numeric:tabular-nums"
FRAME = f"outline:3px solid {MINE};outline-offset:-2px;"
"""Of a cell that stands out: inside of it, so that it moves no other; borders of a table are shared by neighbours."""

_HEAD = "padding:2px 6px;font-weight:normal;color:#666;text-align:center"


def as_html(grid: Grid) -> str:
    """Return the grid as HTML: a table per panel, coloured by host or by group; tooltips name the host and group."""
    legend = "".join(f"<div>{escape(note)}</div>" for note in grid.notes)
    tables = "".join(_table(grid, panel) for panel in grid.panels)
    swatches = ("" if grid.axis else _swatches(grid)) + framed(grid.frame_text)
    return f"<div><div><b>{escape(grid.headline)}</b></div>{tables}<div>{swatches}</div>{legend}</div>"


def _table(grid: Grid, panel: Panel) -> str:
    before, after = [CUT] * grid.columns.is_cut_before, [CUT] * grid.columns.is_cut_after
    lines = [f"<tr>{_heads([panel.title, *before, *grid.column_labels, *after])}</tr>"]
    lines += [f"<tr>{_heads([CUT])}</tr>"] * grid.rows.is_cut_before
    for label, row in zip(grid.row_labels, panel.rows, strict=True):
        lines.append(f"<tr>{_heads([label, *([''] * len(before))])}{''.join(_cell(grid, cell) for cell in row)}</tr>")
    lines += [f"<tr>{_heads([CUT])}</tr>"] * grid.rows.is_cut_after
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'


def _heads(labels: list[str]) -> str:
    return "".join(f'<th style="{_HEAD}">{escape(label)}</th>' for label in labels)


def _cell(grid: Grid, cell: Cell) -> str:
    frame = FRAME if cell.is_mine or cell.is_with_me else ""
    weight = "bold" if cell.is_mine else "normal"
    style = (
        f"background:{grid.fill(cell)};color:#000;border:1px solid #fff;{frame}padding:4px 10px;"
        f"text-align:center;font-weight:{weight}"
    )
    about = [f"rank {cell.rank}"]
    if cell.host is not None:
        about.append(f"on {grid.hosts[cell.host][0]}")
    if cell.group is not None:
        about.append(f"group {cell.group} along {grid.axis}")
    letters = f"<sub>{mark(cell.host)}</sub>" if cell.host is not None and has_letters(grid) else ""
    return f'<td style="{style}" title="{escape(", ".join(about))}">{cell.rank}{letters}</td>'


def _swatches(grid: Grid) -> str:
    if grid.num_hosts == 1:  # its cells have no colour of their own
        return f'<span style="margin-right:6px">all ranks on {escape(grid.hosts[0][0])}</span>'
    named, more = legend_of_hosts(grid)
    spans = []
    for number, label in named.items():
        style = f"background:{fill(number, None)};color:#000;padding:1px 8px;margin-right:6px"
        letters = f"{mark(number)} " if has_letters(grid) else ""
        spans.append(f'<span style="{style}">{letters}{escape(label)}</span>')
    return "".join(spans) + more


def framed(label: str) -> str:
    """Return the entry of a legend for the frame around cells; empty without a label."""
    style = f"border:2px solid {MINE};padding:0 8px;margin-right:6px"
    return f'<span style="{style}"></span>framed: {escape(label)}' if label else ""
