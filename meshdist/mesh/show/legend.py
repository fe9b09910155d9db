"""The legend of a drawing made with matplotlib: below the cells, and no wider than they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.system.palette import MINE

# In font sizes: a swatch with the space behind it, and the space between two columns.
_SWATCH, _BETWEEN = 2.3, 1.2
_POINTS_PER_INCH = 72.0
NO_BREAK = "\u00a0"
"""A space at which `wrapped` does not break a text."""


def frame(label: str) -> Any:
    """Return the entry of a frame around cells."""
    from matplotlib.patches import Patch

    return Patch(facecolor="none", edgecolor=MINE, linewidth=2.0, label=label)


def width_in_of(ax: Any) -> float:
    """Return the width of some axes in inches, before they are laid out."""
    return float(ax.get_position().width * ax.figure.bbox.width / ax.figure.dpi)


def wrapped(text: str, width_in: float) -> list[str]:
    """Break a text between words into lines of at most this width; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and _width_in(f"{lines[-1]} {word}") <= width_in:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [line.replace(NO_BREAK, " ") for line in lines]


def title_above(ax: Any, text: str, middle: float, width_in: float) -> None:
    """Write the title above the middle of the cells, a place in the units of the axis."""
    left, right = ax.get_xlim()
    ax.set_title("\n".join(wrapped(text, width_in)), fontsize="small", x=(middle - left) / (right - left))


def legend_below(ax: Any, entries: Sequence[Any], notes: Sequence[str], middle: float, width_in: float) -> None:
    """Write the notes and the entries below the middle of the cells."""
    from matplotlib.font_manager import FontProperties

    if not entries and not notes:
        return
    em_in = FontProperties(size="small").get_size_in_points() / _POINTS_PER_INCH
    for entry in entries:
        entry.set_label("\n".join(wrapped(entry.get_label(), width_in - _SWATCH * em_in)))
    longest = max((_width_in(line) for entry in entries for line in entry.get_label().split("\n")), default=0.0)
    column_in = longest + (_SWATCH + _BETWEEN) * em_in
    left, right = ax.get_xlim()
    ax.legend(
        handles=entries,
        title="\n".join(line for note in notes for line in wrapped(note, width_in)) or None,
        alignment="left",
        loc="upper center",
        bbox_to_anchor=((middle - left) / (right - left), 0.0),
        ncols=max(1, min(len(entries), int((width_in + _BETWEEN * em_in) / column_in))),
        frameon=False,
        fontsize="small",
        title_fontsize="small",
        borderpad=0.0,
        borderaxespad=0.0,
        handlelength=1.6,
        handletextpad=0.7,
        columnspacing=_BETWEEN,
    )


def _width_in(line: str) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(line, FontProperties(size="small"), ismath=False)
    return float(width) / _POINTS_PER_INCH
