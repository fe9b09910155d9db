"""Draw with matplotlib which rank holds which part of an array."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshdist.mesh.show.plot import panels_across
from meshdist.mesh.show.text import CUT
from meshdist.mesh.show.words import (
    NO_BREAK,
    Extent,
    Scale,
    Words,
    axes_around,
    box_of,
    frame,
    medium_pt,
    small_pt,
    text_width_in,
)
from meshdist.system.drawing_style import MINE, PLAIN
from meshdist.tensor.array_picture import Block, Picture, Slice

# Of a block of the average size: in a figure of our own, and in given Axes, where smaller blocks have smaller texts.
_UNIT_IN, _LEAST_UNIT_IN = 0.8, 0.45
# In this unit: the least side of a block, the height of a band in a block, the space around labels, and between slices.
_LEAST, _BAND, _GAP, _BETWEEN = 0.45, 0.24, 0.12, 0.3
_INSET = 0.015  # of a block, on each side
# Above the blocks of a slice: the middle of the labels of its columns and of its index, and its top.
_TO_LABELS, _TO_INDEX, _ABOVE = 0.22, 0.5, 0.7
_LEAST_WIDTH_IN = 2.6  # of the text around the blocks
_ASPECT = 1.5  # of a figure of our own with several slices, width by height


def as_plot(picture: Picture, ax: Any = None) -> Any:
    """Draw the blocks in proportion to their rows, those of the calling rank framed; return the Axes."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "DTensor.show: form='plot' needs matplotlib; pip install matplotlib, or use form='text'"
        ) from error

    rows, columns = picture.rows, picture.columns
    unit_in = _UNIT_IN if ax is None else _LEAST_UNIT_IN
    widest_in = max(
        *(text_width_in(label, small_pt()) for label in columns.labels),
        *(text_width_in(block.text, medium_pt()) for block in picture.blocks),
    )
    wide = _extents(columns.sizes, max(1.0, widest_in / unit_in + 2 * _GAP))
    tall = [1.0] if rows.dim is None else _extents(rows.sizes, 1.0 if len(rows.sizes) <= 8 else 0.6)
    width, height = sum(wide), sum(tall)
    beside = _BETWEEN + _GAP + max(text_width_in(label, small_pt()) for label in rows.labels) / unit_in
    above = _ABOVE if picture.slices[0].index else _TO_INDEX
    pitch = height + above + _BETWEEN
    aspect = _ASPECT if ax is None else box_of(ax).width / box_of(ax).height
    across = panels_across(len(picture.slices), pitch, width + beside, aspect)
    down = math.ceil(len(picture.slices) / across)
    right, bottom = across * (width + beside) - beside, down * pitch - above - _BETWEEN
    extent = Extent(-beside, right + beside, -above, bottom + _GAP + 0.2 * rows.window.is_cut_after)
    # Broken between axes: not in a shape or a placement, nor between an axis and its placement.
    title = re.sub(r"\((?:[^()]|\([^()]*\))*\)|: ", lambda found: found[0].replace(" ", NO_BREAK), picture.title)
    entries = [frame(picture.framed)] if picture.framed else []
    words = Words(title, entries, [f"numbers: ranks of {picture.mesh}", *picture.outside, *picture.notes])
    ax, scale = axes_around(extent, unit_in, words, max(unit_in * right, _LEAST_WIDTH_IN), ax)
    for number, part in enumerate(picture.slices):
        row, column = divmod(number, across)
        left, top = column * (width + beside), row * pitch
        _draw_slice(ax, picture, part, np.cumsum([left, *wide]), np.cumsum([top, *tall]), scale)
    return ax


def _draw_slice(ax: Any, picture: Picture, part: Slice, x: Any, y: Any, scale: Scale) -> None:
    """Draw the blocks of a slice, whose sides are at these places, and their labels."""
    rows, columns = picture.rows, picture.columns

    def write(at_x: float, at_y: float, text: str, side: str, **how: Any) -> None:
        ax.text(at_x, at_y, text, ha=side, va="center", **{"color": "#666666", "fontsize": scale.label_pt, **how})

    if part.index:
        write((x[0] + x[-1]) / 2, y[0] - _TO_INDEX, part.index, "center", color="black")
    for label, (left, right) in zip(columns.labels, pairwise(x), strict=True):
        write((left + right) / 2, y[0] - _TO_LABELS, label, "center")
    for label, blocks, (top, bottom) in zip(rows.labels, part.blocks, pairwise(y), strict=True):
        write(x[0] - _GAP, (top + bottom) / 2, label, "right")
        for block, (left, right) in zip(blocks, pairwise(x), strict=True):
            _draw(ax, block, left, top, right - left, bottom - top, scale)
    for is_cut, at_x, at_y, side in (
        (columns.window.is_cut_before, x[0] - _GAP, y[0] - _TO_LABELS, "right"),
        (columns.window.is_cut_after, x[-1] + _GAP, y[0] - _TO_LABELS, "left"),
        (rows.window.is_cut_before, x[0] - _GAP, y[0] - 0.05, "right"),
        (rows.window.is_cut_after, x[0] - _GAP, y[-1] + 0.15, "right"),
    ):
        if is_cut:
            write(at_x, at_y, CUT, side)


def _draw(ax: Any, block: Block, left: float, top: float, width: float, height: float, scale: Scale) -> None:
    """Draw a block: filled with the colour of its rank, or with a band of the colours of all that hold it."""
    from matplotlib.patches import Rectangle

    left, top, width, height = left + _INSET, top + _INSET, width - 2 * _INSET, height - 2 * _INSET
    colours = block.colours
    is_filled = len(colours) == 1
    band = 0.0 if is_filled else min(_BAND, 0.3 * height)
    ax.add_patch(Rectangle((left, top), width, height, facecolor=colours[0] if is_filled else PLAIN))
    if not colours:
        hatched: dict[str, Any] = {"facecolor": "#dddddd", "edgecolor": "#999999", "hatch": "/////", "linewidth": 0.0}
        ax.add_patch(Rectangle((left, top + height - band), width, band, **hatched))
    for number, colour in enumerate([] if is_filled else colours):
        part = width / len(colours)
        ax.add_patch(Rectangle((left + number * part, top + height - band), part, band, facecolor=colour))
    linewidth = scale.frame_pt if block.is_mine else 1.0
    edge: dict[str, Any] = {"edgecolor": MINE if block.is_mine else "white", "linewidth": linewidth}
    # A frame is drawn inside of its block, so that it covers no neighbour.
    half = scale.units(linewidth) / 2 if block.is_mine else 0.0
    ax.add_patch(Rectangle((left + half, top + half), width - 2 * half, height - 2 * half, facecolor="none", **edge))
    size = scale.number_pt(block.text, width, height - band)
    middle = left + width / 2, top + (height - band) / 2
    ax.text(*middle, block.text, ha="center", va="center", color="black", fontsize=size)


def _extents(sizes: Sequence[int], unit: float) -> list[float]:
    """Return how long the blocks are drawn: in proportion, with room for a label; rows that are not cut as two."""
    if len(sizes) == 1:
        return [unit * (2 if sizes[0] else _LEAST)]
    whole = sum(sizes) or 1
    return [unit * max(_LEAST, len(sizes) * size / whole) for size in sizes]
