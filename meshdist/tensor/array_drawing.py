"""Draw which rank holds which part of an array: its blocks as text, as HTML or with matplotlib."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from meshdist.mesh import show as drawing
from meshdist.mesh.show import FORMS, in_notebook
from meshdist.mesh.show.grid import Window
from meshdist.mesh.show.html import framed
from meshdist.mesh.show.legend import NO_BREAK, frame, legend_below, title_above, width_in_of, wrapped
from meshdist.mesh.show.text import CUT
from meshdist.system.palette import MINE, PLAIN, fill
from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.dispatch import implements
from meshdist.tensor.dtensor import DTensor
from meshdist.tensor.placements import Replicate, Shard

# The visible part of an array of many blocks, around that of the calling rank.
MOST_ROWS = 16
MOST_LETTERS = 88  # in a line of text; columns are left out beyond
MOST_LISTED = 4  # ranks in a cell

_NOUNS = {"sum": "sum", "product": "product", "max": "maximum", "min": "minimum", "avg": "average"}


@dataclass(frozen=True)
class Block:
    """A cell of the drawing."""

    text: str  # the ranks that hold it
    holders: list[int]  # the ranks that hold it, by their places in the order of the mesh, for its colours
    is_mine: bool  # the calling rank, which stands out, holds it, or a part of its reduction
    is_empty: bool


@dataclass(frozen=True)
class Side:
    """The visible blocks along one dimension: the slice of each, and its rows."""

    dim: int | None
    labels: list[str]
    sizes: list[int]
    window: Window


@dataclass(frozen=True)
class Picture:
    """An array to draw."""

    title: str  # shape, dtype and placements
    mesh: str  # its axes with their sizes
    held: str  # the calling rank and what it holds, in words; empty if it does not stand out
    rows: Side
    columns: Side
    blocks: list[list[Block]]
    notes: list[str]  # what replicates, what is pending and what is left out, in words


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
        return as_plot(picture, ax)
    if form == "html":
        return as_html(picture)
    if form is None and in_notebook():
        from IPython.display import HTML, display

        display(HTML(as_html(picture)))
    else:
        print(as_text(picture))
    return None


def picture_of(x: DTensor, *, marks_me: bool) -> Picture:
    """Return the blocks of `x` along two of its dimensions: the last two that are cut.

    With `marks_me`, the calling rank stands out, and of many blocks those around its own are visible.
    """
    layout, mesh, names = x.layout, x.mesh, x.mesh.mesh_dim_names
    coordinate = mesh.get_coordinate() if marks_me else None
    at = (0,) * mesh.ndim if coordinate is None else tuple(coordinate)
    row_dim, column_dim = _shown_dims(layout)
    columns = _side(layout, column_dim, at, _most_columns(layout, column_dim))
    rows = _side(layout, row_dim, at, MOST_ROWS)
    fixed = {
        axis: at[axis]
        for dim, cut in enumerate(layout.cuts)
        if cut is not None and dim not in (row_dim, column_dim)
        for axis in cut.axes
    }
    ranks = np.asarray(mesh.mesh)
    numbers = np.arange(ranks.size).reshape(ranks.shape)
    mine = mesh.get_rank()
    pending = tuple(layout.pending)

    def block(row: int, column: int) -> Block:
        place = {**fixed, **_place(layout, row_dim, row), **_place(layout, column_dim, column)}
        free = [axis for axis in range(mesh.ndim) if axis not in place and axis not in pending]
        order, index = (*place, *free, *pending), tuple(place.values())
        held = ranks.transpose(order)[index].reshape(math.prod(mesh.shape[axis] for axis in free), -1)
        empty = 0 in (rows.sizes[row - rows.window.first], columns.sizes[column - columns.window.first])
        return Block(
            _held_text(held, set(layout.pending.values())),
            numbers.transpose(order)[index].ravel().tolist(),
            coordinate is not None and bool((held == mine).any()),
            empty or 0 in layout.shape,
        )

    held = ", ".join(f"{part.start}:{part.stop}" for part in layout.index(at)) or "..."
    sizes = [f"{size}" if names is None else f"{names[axis]}={size}" for axis, size in enumerate(mesh.shape)]
    return Picture(
        f"{x.dtype} {layout.describe(names)}",
        f"mesh ({', '.join(sizes)})",
        f"rank {mine} " + ("is outside" if coordinate is None else f"holds [{held}]") if marks_me else "",
        rows,
        columns,
        [
            [block(row, column) for column in range(columns.window.first, columns.window.end)]
            for row in range(rows.window.first, rows.window.end)
        ],
        [*_notes(layout, names), *_left_out(layout, rows, columns, layout.index(at), marks_me)],
    )


def _shown_dims(layout: ArrayLayout) -> tuple[int | None, int | None]:
    """Return the dimensions drawn downwards and across."""
    if layout.ndim < 2:
        return None, (0 if layout.ndim else None)
    cut = [dim for dim, cut in enumerate(layout.cuts) if cut is not None]
    others = [dim for dim in range(layout.ndim) if dim not in cut]
    first, last = sorted((others + cut)[-2:])
    return first, last


def _most_columns(layout: ArrayLayout, dim: int | None) -> int:
    if dim is None:
        return 1
    one_each = all(isinstance(placement, Shard) for placement in layout.placements)
    ranks = len(str(math.prod(layout.mesh_shape))) * (1 if one_each else 2) + 6
    return max(2, MOST_LETTERS // max(2 * len(str(layout.shape[dim])) + 2, ranks))


def _side(layout: ArrayLayout, dim: int | None, at: Sequence[int], most: int) -> Side:
    cut = None if dim is None else layout.cuts[dim]
    if dim is None or cut is None:
        rows = 1 if dim is None else layout.shape[dim]
        return Side(dim, ["" if dim is None else f"0:{rows}"], [rows], Window(0, 1, 1))
    extents = [layout.mesh_shape[axis] for axis in cut.axes]
    mine = int(np.ravel_multi_index(tuple(at[axis] for axis in cut.axes), extents))
    window = Window.around(mine, most, len(cut.sizes))
    start = sum(cut.sizes[: window.first])
    sizes, labels = list(cut.sizes[window.first : window.end]), []
    for size in sizes:
        labels.append(f"{start}:{start + size}")
        start += size
    return Side(dim, labels, sizes, window)


def _place(layout: ArrayLayout, dim: int | None, block: int) -> dict[int, int]:
    """Return the coordinates of the ranks with this block of a dimension, along the axes that cut it."""
    cut: Cut | None = None if dim is None else layout.cuts[dim]
    if cut is None:
        return {}
    index = np.unravel_index(block, [layout.mesh_shape[axis] for axis in cut.axes])
    return dict(zip(cut.axes, map(int, index), strict=True))


def _held_text(held: np.ndarray[Any, np.dtype[np.int64]], pending: set[str]) -> str:
    """Return the ranks of one block in words, those of a pending reduction with its operation: `0+1, 2+3`."""
    copies, parts = held.shape
    if parts == 1:
        return _listed([str(rank) for rank in _ends(held[:, 0])], copies, " ")
    op = pending.pop() if len(pending) == 1 else "sum"
    sign = {"sum": "+", "product": "*"}.get(op, " ")
    sums = [_listed([str(rank) for rank in _ends(copy)], parts, sign) for copy in _ends(held)]
    return _listed(sums if sign != " " else [f"{op}({ranks})" for ranks in sums], copies, ", ")


def _ends(ranks: np.ndarray[Any, Any]) -> list[Any]:
    """Return all of a few, and the first and the last of many."""
    return list(ranks) if len(ranks) <= MOST_LISTED else [ranks[0], ranks[-1]]


def _listed(words: list[str], count: int, sign: str) -> str:
    if count > MOST_LISTED or len(sign.join(words)) > 15:
        return words[0] if count == 1 else f"{words[0]}{sign}{CUT}{sign}{words[-1]}"
    return sign.join(words)


def _notes(layout: ArrayLayout, names: Sequence[str] | None) -> list[str]:
    notes = []
    for axis, (placement, size) in enumerate(zip(layout.placements, layout.mesh_shape, strict=True)):
        along = f"the {size} ranks along {f'axis {axis}' if names is None else names[axis]}"
        if isinstance(placement, Replicate):
            notes.append(f"replicated: {along} hold the same")
        elif not isinstance(placement, Shard):
            notes.append(f"pending {placement.op}: the array is the {_NOUNS[placement.op]} of what {along} hold")
    return notes


def _left_out(layout: ArrayLayout, rows: Side, columns: Side, mine: Sequence[slice], marks_me: bool) -> list[str]:
    notes = []
    if layout.ndim > 2:
        text = f"down: dimension {rows.dim}; across: dimension {columns.dim}"
        fixed = [
            f"{part.start}:{part.stop} of dimension {dim}"
            for dim, (cut, part) in enumerate(zip(layout.cuts, mine, strict=True))
            if cut is not None and dim not in (rows.dim, columns.dim)
        ]
        held = ", which this rank holds" if marks_me else ""
        notes.append(f"{text}; at {', '.join(fixed)}{held}" if fixed else text)
    shown = [side.window.end - side.window.first for side in (rows, columns)]
    whole = rows.window.size * columns.window.size
    if math.prod(shown) < whole:
        notes.append(f"{math.prod(shown)} of {whole} blocks are shown")
    return notes


# ---- As text


def as_text(picture: Picture) -> str:
    """Return the blocks as lines of text, those of the calling rank in brackets."""
    rows, columns = picture.rows, picture.columns
    cells = [[f"[{block.text}]" if block.is_mine else f"{block.text} " for block in row] for row in picture.blocks]
    width = max(len(text) for text in [*columns.labels, *(text for row in cells for text in row)])
    margin = max(map(len, rows.labels)) + 1
    before = CUT + " " if columns.window.is_cut_before else ""
    after = " " + CUT if columns.window.is_cut_after else ""
    lines = [picture.title, f"{picture.mesh}, {picture.held}" if picture.held else picture.mesh, ""]
    if any(columns.labels):
        labels = " ".join(label.rjust(width) for label in columns.labels)
        lines.append(" " * (margin + 1) + before + labels + after)
    lines += [CUT.rjust(margin)] * rows.window.is_cut_before
    for label, row in zip(rows.labels, cells, strict=True):
        texts = " ".join(text.rjust(width) for text in row)
        lines.append((label.rjust(margin) + " " + " " * len(before) + texts).rstrip())
    lines += [CUT.rjust(margin)] * rows.window.is_cut_after
    return "\n".join([*lines, "", *picture.notes]).rstrip()


# ---- As HTML

_TABLE = "border-collapse:collapse;margin:0.3em 0;font-variant-numeric:tabular-nums"
_HEAD = "padding:2px 6px;font-weight:normal;color:#666;text-align:center"


def as_html(picture: Picture) -> str:
    """Return the blocks as an HTML table, those of the calling rank framed."""
    rows, columns = picture.rows, picture.columns
    before, after = [CUT] * columns.window.is_cut_before, [CUT] * columns.window.is_cut_after
    more = f"<tr>{_heads([CUT])}</tr>"
    lines = [f"<tr>{_heads(['', *before, *columns.labels, *after])}</tr>"]
    lines += [more] * rows.window.is_cut_before
    for label, row in zip(rows.labels, picture.blocks, strict=True):
        lines.append(f"<tr>{_heads([label, *([''] * len(before))])}{''.join(map(_cell, row))}</tr>")
    lines += [more] * rows.window.is_cut_after
    title = f"<b>{escape(picture.title)}</b><br>{escape(_CAPTION.format(picture.mesh))}"
    notes = "".join(f"<div>{escape(note)}</div>" for note in [*_outside(picture), *picture.notes])
    legend = f"<div>{framed(_framed(picture))}</div>" if _framed(picture) else ""
    return f'<div><div>{title}</div><table style="{_TABLE}">{"".join(lines)}</table>{legend}{notes}</div>'


def _heads(labels: Sequence[str]) -> str:
    return "".join(f'<th style="{_HEAD}">{escape(label)}</th>' for label in labels)


def _cell(block: Block) -> str:
    border = f"3px solid {MINE}" if block.is_mine else "1px solid #fff"
    style = f"background:{_background(block)};color:#000;border:{border};padding:6px 14px 9px;text-align:center"
    return f'<td style="{style}">{escape(block.text)}</td>'


def _background(block: Block) -> str:
    colours = _colours(block)
    if len(colours) == 1:
        return colours[0]
    stops = [f"{colour} {k / len(colours):.0%} {(k + 1) / len(colours):.0%}" for k, colour in enumerate(colours)]
    band = f"linear-gradient(90deg,{','.join(stops)})" if colours else f"repeating-linear-gradient(135deg,{_HATCHED})"
    return f"{band} 0 100%/100% 7px no-repeat {PLAIN}"


# ---- Colours

# Of the band of a block that more ranks hold than have stripes in it.
_HATCHED = "#999 0 2px,#ddd 2px 5px"


def _colours(block: Block) -> list[str]:
    """Return the colours of the ranks that hold a block: one fills it, several share a band; none for too many."""
    if block.is_empty:
        return [PLAIN]
    return [fill(number, None) for number in block.holders] if len(block.holders) <= MOST_LISTED else []


# ---- The legend

_CAPTION = "numbers: ranks of {}"


def _framed(picture: Picture) -> str:
    """Return what is framed, in words; empty if no visible block is."""
    return picture.held if any(block.is_mine for row in picture.blocks for block in row) else ""


def _outside(picture: Picture) -> list[str]:
    return [picture.held] if picture.held and not _framed(picture) else []


# ---- With matplotlib

_INCH = 0.8  # of a block of the average size
_LEAST = 0.45  # the least side of a block, of this unit
_LEAST_WIDTH_IN = 2.6  # of the text around it
_LINE_IN = 0.16
_BAND = 0.24  # the height of a band in a block, of this unit


def as_plot(picture: Picture, ax: Any = None) -> Any:
    """Draw the blocks in proportion to their rows, those of the calling rank framed; return the Axes."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "DTensor.show: form='plot' needs matplotlib; pip install matplotlib, or use form='text'"
        ) from error

    rows, columns = picture.rows, picture.columns
    letters = max(len(block.text) for row in picture.blocks for block in row)
    tall = [1.0] if rows.dim is None else _extents(rows.sizes, 1.0 if len(rows.sizes) <= 8 else 0.6)
    wide = _extents(columns.sizes, max(1.0, 0.16 * letters, 0.13 * max(map(len, columns.labels))))
    left, top = np.cumsum([0.0, *wide]), np.cumsum([0.0, *tall])
    margin = 0.3 + 0.13 * max(map(len, rows.labels))
    width_in = max(_INCH * left[-1], _LEAST_WIDTH_IN)
    notes = [_CAPTION.format(picture.mesh), *_outside(picture), *picture.notes]
    # Broken between axes alone: not in a tuple, nor between an axis and its placement.
    title = re.sub(r"\([^()]*\)|: ", lambda found: found[0].replace(" ", NO_BREAK), picture.title)
    if ax is None:
        lines = sum(len(wrapped(text, width_in)) for text in [title, *notes]) + 2
        size = (max(_INCH * (left[-1] + 2 * margin), width_in + 0.4), _INCH * (top[-1] + 0.7) + _LINE_IN * lines + 0.4)
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    else:
        width_in = width_in_of(ax)
    pale = {"color": "#666666", "fontsize": "small"}
    for row, blocks in enumerate(picture.blocks):
        ax.text(-0.12, top[row] + tall[row] / 2, rows.labels[row], ha="right", va="center", **pale)
        for column, block in enumerate(blocks):
            _draw(ax, block, left[column], top[row], wide[column], tall[row])
    for column, label in enumerate(columns.labels):
        ax.text(left[column] + wide[column] / 2, -0.12, label, ha="center", va="bottom", **pale)
    for is_cut, x, y in (
        (columns.window.is_cut_before, -0.1, -0.2),
        (columns.window.is_cut_after, left[-1] + 0.2, -0.2),
        (rows.window.is_cut_before, -0.12, -0.05),
        (rows.window.is_cut_after, -0.12, top[-1] + 0.15),
    ):
        if is_cut:
            ax.text(x, y, CUT, ha="right", va="center", **pale)
    ax.set_xlim(-margin, left[-1] + 0.25)
    ax.set_ylim(top[-1] + 0.25, -0.45)
    ax.set_aspect("equal")
    ax.set_axis_off()
    title_above(ax, title, left[-1] / 2, width_in)
    entries = [frame(_framed(picture))] if _framed(picture) else []
    legend_below(ax, entries, notes, left[-1] / 2, width_in)
    return ax


def _draw(ax: Any, block: Block, left: float, top: float, width: float, height: float) -> None:
    """Draw a block: filled with the colour of its rank, or with a band of the colours of all that hold it."""
    from matplotlib.patches import Rectangle

    # A frame is drawn inside of its block, so that it covers no neighbour.
    inset = 0.045 if block.is_mine else 0.015
    left, top, width, height = left + inset, top + inset, width - 2 * inset, height - 2 * inset
    colours = _colours(block)
    is_filled = len(colours) == 1
    band = 0.0 if is_filled else min(_BAND, 0.3 * height)
    ax.add_patch(Rectangle((left, top), width, height, facecolor=colours[0] if is_filled else PLAIN))
    if not colours:
        hatched: dict[str, Any] = {"facecolor": "#dddddd", "edgecolor": "#999999", "hatch": "/////", "linewidth": 0.0}
        ax.add_patch(Rectangle((left, top + height - band), width, band, **hatched))
    for number, colour in enumerate([] if is_filled else colours):
        part = width / len(colours)
        ax.add_patch(Rectangle((left + number * part, top + height - band), part, band, facecolor=colour))
    edge: dict[str, Any] = {"edgecolor": MINE if block.is_mine else "white", "linewidth": 2.5 if block.is_mine else 1.0}
    ax.add_patch(Rectangle((left, top), width, height, facecolor="none", **edge))
    ax.text(left + width / 2, top + (height - band) / 2, block.text, ha="center", va="center", color="black")


def _extents(sizes: Sequence[int], unit: float) -> list[float]:
    """Return how long the blocks are drawn: in proportion, with room for a label; one that is not cut as two."""
    if len(sizes) == 1:
        return [2 * unit]
    whole = sum(sizes) or 1
    return [unit * max(_LEAST, len(sizes) * size / whole) for size in sizes]
