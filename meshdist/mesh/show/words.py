"""The words around cells drawn with matplotlib: a title above and a legend below, which do not leave the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshdist.system.drawing_style import MINE

# In font sizes: a swatch with the space behind it, and the space between two columns.
_SWATCH, _BETWEEN = 2.3, 1.2
_POINTS_PER_INCH = 72.0
# Inches: around all in a figure of our own; below the title, as matplotlib has it; below the legend.
_MARGIN, _BELOW_TITLE, _BELOW_LEGEND = 0.12, 6.0 / _POINTS_PER_INCH, 0.03
# A figure of our own is as wide as its longest note, up to so many inches.
_MOST_NOTE_IN = 4.2
# Of given Axes, the words take at most this share of the height; they are written smaller if they need more.
_MOST_WORDS = 0.5
_SMALLER, _SMALLEST_PT = 0.9, 1.0
NO_BREAK = "\u00a0"
"""A space at which `wrapped` breaks only what is wider than a line."""


@dataclass(frozen=True)
class Extent:
    """What cells and their labels take, in the units of the data; y grows downwards."""

    left: float
    right: float
    top: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top


@dataclass(frozen=True)
class Words:
    """The title, and the handles and notes of the legend."""

    title: str
    entries: Sequence[Any]
    notes: Sequence[str]


@dataclass(frozen=True)
class Scale:
    """How large cells are drawn, and their texts and frames."""

    unit_in: float  # the inches of a unit of the data
    share: float  # of the usual size, at most 1

    @property
    def label_pt(self) -> float:
        """The font size of labels."""
        return self.share * small_pt()

    @property
    def frame_pt(self) -> float:
        """The width of the frame around a cell."""
        return max(1.0, 2.5 * self.share)

    def units(self, points: float) -> float:
        """Return a length in units of the data."""
        return points / _POINTS_PER_INCH / self.unit_in

    def number_pt(self, text: str, width: float, height: float) -> float:
        """Return the font size, at most the usual one, in which a text fits into so many units."""
        fits_across = 0.85 * width * self.unit_in / text_width_in(text, 1.0)
        return min(medium_pt(), fits_across, 0.65 * height * self.unit_in * _POINTS_PER_INCH)


@dataclass(frozen=True)
class _Written:
    """The sizes of words, in inches."""

    width: float
    title_height: float
    legend_height: float


def axes_around(extent: Extent, unit_in: float, words: Words, width_in: float, ax: Any = None) -> tuple[Any, Scale]:
    """Write the words around the place of cells; return the Axes, and the scale of the cells.

    Args:
        extent: The place of the cells; the words are above and below its middle.
        unit_in: The inches of a unit in a figure of our own; in given Axes, those below which texts become smaller.
        words: The words.
        width_in: The width of the words in such a figure, unless a note needs more.
        ax: The Axes to draw in, whose size decides that of the cells. None: those of a figure that all fits into.
    """
    if ax is None:
        return _new_axes(extent, unit_in, words, width_in), Scale(unit_in, 1.0)
    ax.set_axis_off()
    ax.set_title(words.title, fontsize="small")
    ax.figure.canvas.figure.draw_without_rendering()  # the layout decides the size of the Axes
    dpi = ax.figure.dpi
    box = box_of(ax)
    width_in, height_in = box.width / dpi, box.height / dpi
    # Figures have room for one line above their Axes.
    above = min(_BELOW_TITLE + 1.2 * small_pt() / _POINTS_PER_INCH, (ax.figure.canvas.figure.bbox.y1 - box.y1) / dpi)
    size_pt = small_pt()
    while True:
        written = _write(ax, words, width_in, size_pt)
        inside = max(0.0, written.title_height - above)
        room = height_in - inside - written.legend_height
        if size_pt < _SMALLEST_PT or (written.width <= width_in and room >= (1 - _MOST_WORDS) * height_in):
            break
        size_pt *= _SMALLER
    unit = min(width_in / extent.width, room / extent.height)
    _place(ax, extent, inside / unit, written.legend_height / unit)
    return ax, Scale(unit, min(1.0, unit / unit_in))


def _new_axes(extent: Extent, unit_in: float, words: Words, width_in: float) -> Any:
    from matplotlib import pyplot

    figure, ax = pyplot.subplots()
    longest_in = max((text_width_in(note, small_pt()) for note in words.notes), default=0.0)
    width_in = max(width_in, min(longest_in, _MOST_NOTE_IN))
    written = _write(ax, words, width_in, small_pt())
    height = unit_in * extent.height + written.legend_height
    # In whole tenths: text is not equally large with all versions of matplotlib.
    width_in, height_in = (
        math.ceil(10 * (inches + 2 * _MARGIN)) / 10
        for inches in (max(unit_in * extent.width, written.width), height + written.title_height)
    )
    figure.set_size_inches(width_in, height_in)
    x, y = _MARGIN / width_in, _MARGIN / height_in
    figure.subplots_adjust(left=x, right=1 - x, bottom=y, top=y + height / height_in)
    _place(ax, extent, 0.0, written.legend_height / unit_in)
    return ax


def _write(ax: Any, words: Words, width_in: float, size_pt: float) -> _Written:
    """Write the title and the legend in lines of at most this width where words allow it."""
    title = ax.set_title("\n".join(wrapped(words.title, width_in, size_pt)), fontsize=size_pt)
    dpi = ax.figure.dpi
    box = title.get_window_extent()
    width, height = box.width / dpi, box.height / dpi + _BELOW_TITLE
    if not words.entries and not words.notes:
        return _Written(width, height, 0.0)
    em_in = size_pt / _POINTS_PER_INCH
    labels = [wrapped(entry.get_label(), width_in - _SWATCH * em_in, size_pt) for entry in words.entries]
    longest = max((text_width_in(line, size_pt) for lines in labels for line in lines), default=0.0)
    column_in = longest + (_SWATCH + _BETWEEN) * em_in
    legend = ax.legend(
        words.entries,
        ["\n".join(lines) for lines in labels],
        title="\n".join(line for note in words.notes for line in wrapped(note, width_in, size_pt)) or None,
        alignment="left",
        loc="upper center",
        ncols=max(1, min(len(words.entries), int((width_in + _BETWEEN * em_in) / column_in))),
        frameon=False,
        fontsize=size_pt,
        title_fontsize=size_pt,
        borderpad=0.0,
        borderaxespad=0.0,
        handlelength=1.6,
        handletextpad=0.7,
        columnspacing=_BETWEEN,
    )
    box = legend.get_window_extent()
    return _Written(max(width, box.width / dpi), height, box.height / dpi + _BELOW_LEGEND)


def _place(ax: Any, extent: Extent, title: float, legend: float) -> None:
    """Show the place of the cells and, within the Axes, so many units of the title above and of the legend below."""
    ax.set_xlim(extent.left, extent.right)
    ax.set_ylim(extent.bottom + legend, extent.top - title)
    ax.set_aspect("equal")
    ax.set_axis_off()
    height = title + extent.height + legend
    ax.set_title(ax.get_title(), y=1 - title / height, fontsize=ax.title.get_fontsize())
    if legend:
        ax.get_legend().set_bbox_to_anchor((0.5, legend / height))


def box_of(ax: Any) -> Any:
    """Return the place of some Axes in pixels, whatever the aspect of their data."""
    return ax.get_position(original=True).transformed(ax.figure.transSubfigure)


def frame(label: str) -> Any:
    """Return the entry of a frame around cells."""
    from matplotlib.patches import Patch

    return Patch(facecolor="none", edgecolor=MINE, linewidth=2.0, label=label)


def wrapped(text: str, width_in: float, size_pt: float) -> list[str]:
    """Break a text between words into lines of at most this width; a longer word has a line of its own."""
    lines: list[str] = []
    words = [
        part
        for word in text.split(" ")
        for part in (word.split(NO_BREAK) if text_width_in(word, size_pt) > width_in else [word])
    ]
    for word in words:
        if lines and text_width_in(f"{lines[-1]} {word}", size_pt) <= width_in:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [line.replace(NO_BREAK, " ") for line in lines]


def text_width_in(line: str, size_pt: float, weight: str = "normal") -> float:
    """Return the width of a line of text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(
        line, FontProperties(size=size_pt, weight=weight), ismath=False
    )
    return float(width) / _POINTS_PER_INCH


def small_pt() -> float:
    """Return the font size of labels and words in points."""
    return _points("small")


def medium_pt() -> float:
    """Return the font size of numbers in points."""
    return _points("medium")


def _points(size: str) -> float:
    from matplotlib.font_manager import FontProperties

    return float(FontProperties(size=size).get_size_in_points())
