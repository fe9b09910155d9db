"""Draw which rank holds which part of an array: its blocks as text, as HTML or with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from meshdist.mesh import show as drawing
from meshdist.mesh.show import FORMS, in_notebook
from meshdist.mesh.show.html import FRAME, framed
from meshdist.mesh.show.text import CUT
from meshdist.system.drawing_style import PLAIN
from meshdist.tensor.array_picture import Block, Picture, Slice, picture_of
from meshdist.tensor.dispatch import implements
from meshdist.tensor.dtensor import DTensor


@implements("show")
def show(x: DTensor, form: str | None, ax: Any) -> Any:
    """Draw `x`; see `DTensor.show`. Communicates nothing."""
    if form == "matplotlib":
        form = "plot"
    if form is not None and form not in FORMS:
        raise ValueError(f"DTensor.show: form must be one of {', '.join(map(repr, FORMS))} or None, got {form!r}")
    if ax is not None and form != "plot":
        raise ValueError("DTensor.show: ax needs form='plot'; pass both")
    picture = picture_of(x, marks_me=drawing.marks_me)
    if form == "plot":
        from meshdist.tensor.array_plot import as_plot

        return as_plot(picture, ax)
    if form == "html":
        return as_html(picture)
    if form is None and in_notebook():
        from IPython.display import HTML, display

        display(HTML(as_html(picture)))
    else:
        print(as_text(picture) + "\n", end="")  # in one piece, as other ranks may be threads
    return None


# ---- As text


def as_text(picture: Picture) -> str:
    """Return the blocks as lines of text, those of the calling rank in brackets."""
    rows, columns = picture.rows, picture.columns
    width = max(len(text) for text in [*columns.labels, *map(_cell_text, picture.blocks)])
    margin = max(map(len, rows.labels)) + 1
    before = CUT + " " if columns.window.is_cut_before else ""
    after = " " + CUT if columns.window.is_cut_after else ""
    lines = [picture.title, f"{picture.mesh}, {picture.held}" if picture.held else picture.mesh]
    for part in picture.slices:
        lines += ["", part.index] if part.index else [""]
        if any(columns.labels):
            labels = " ".join(label.rjust(width) for label in columns.labels)
            lines.append(" " * (margin + 1) + before + labels + after)
        lines += [CUT.rjust(margin)] * rows.window.is_cut_before
        for label, blocks in zip(rows.labels, part.blocks, strict=True):
            texts = " ".join(_cell_text(block).rjust(width) for block in blocks)
            lines.append((label.rjust(margin) + " " + " " * len(before) + texts).rstrip())
        lines += [CUT.rjust(margin)] * rows.window.is_cut_after
    return "\n".join([*lines, "", *picture.notes]).rstrip()


def _cell_text(block: Block) -> str:
    # The space aligns the ranks of a column.
    return f"[{block.text}]" if block.is_mine else f"{block.text} "


# ---- As HTML

_TABLE = "border-collapse:collapse;display:inline-table;margin:0.3em 1.5em 0.3em 0;font-variant-numeric:tabular-nums"
_HEAD = "padding:2px 6px;font-weight:normal;color:#666;text-align:center"


def as_html(picture: Picture) -> str:
    """Return the blocks as an HTML table for each slice, those of the calling rank framed."""
    title = f"<b>{escape(picture.title)}</b><br>numbers: ranks of {escape(picture.mesh)}"
    tables = "".join(_table(picture, part) for part in picture.slices)
    notes = "".join(f"<div>{escape(note)}</div>" for note in [*picture.outside, *picture.notes])
    legend = f"<div>{framed(picture.framed)}</div>" if picture.framed else ""
    return f"<div><div>{title}</div><div>{tables}</div>{legend}{notes}</div>"


def _table(picture: Picture, part: Slice) -> str:
    rows, columns = picture.rows, picture.columns
    before, after = [CUT] * columns.window.is_cut_before, [CUT] * columns.window.is_cut_after
    more = f"<tr>{_heads([CUT])}</tr>"
    lines = [f'<caption style="font-weight:bold">{part.index}</caption>'] if part.index else []
    lines += [f"<tr>{_heads(['', *before, *columns.labels, *after])}</tr>"]
    lines += [more] * rows.window.is_cut_before
    for label, blocks in zip(rows.labels, part.blocks, strict=True):
        lines.append(f"<tr>{_heads([label, *([''] * len(before))])}{''.join(map(_cell, blocks))}</tr>")
    lines += [more] * rows.window.is_cut_after
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'


def _heads(labels: Sequence[str]) -> str:
    return "".join(f'<th style="{_HEAD}">{escape(label)}</th>' for label in labels)


def _cell(block: Block) -> str:
    style = f"background:{_background(block)};color:#000;border:1px solid #fff;padding:6px 14px 9px;text-align:center"
    style += f";{FRAME}" if block.is_mine else ""
    return f'<td style="{style}">{escape(block.text)}</td>'


def _background(block: Block) -> str:
    colours = block.colours
    if len(colours) == 1:
        return colours[0]
    stops = [f"{colour} {k / len(colours):.0%} {(k + 1) / len(colours):.0%}" for k, colour in enumerate(colours)]
    band = f"linear-gradient(90deg,{','.join(stops)})" if colours else f"repeating-linear-gradient(135deg,{_HATCHED})"
    return f"{band} 0 100%/100% 7px no-repeat {PLAIN}"


# Of the band of a block that more ranks hold than have stripes in it.
_HATCHED = "#999 0 2px,#ddd 2px 5px"
