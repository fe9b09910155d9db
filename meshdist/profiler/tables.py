"""Volumes of bytes in words, as tables of text or HTML, and as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.system.drawing_style import fill

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Up to here bytes are written without a unit prefix.
_MOST_BYTES = 9999


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the head, as text: two columns to the left, the others to the right."""
    widths = _widths(rows)
    return "\n".join("  ".join(_aligned(row, widths)).rstrip() for row in rows)


def text_width(rows: Sequence[Sequence[str]]) -> int:
    """Return the width of `text_table(rows)`."""
    widths = _widths(rows)
    return sum(widths) + 2 * (len(widths) - 1)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    from html import escape  # 2 ms, which most programs do not need

    head, *others = rows
    lines = ["".join(f'<th style="text-align:{side(k)}">{escape(cell)}</th>' for k, cell in enumerate(head))]
    lines += [
        "".join(f'<td style="text-align:{side(k)}">{escape(cell)}</td>' for k, cell in enumerate(row)) for row in others
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def bytes_text(nbytes: float) -> str:
    if nbytes <= _MOST_BYTES:
        return f"{nbytes:.0f} B"
    power = min((int(nbytes).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{nbytes / 1024**power:.{2 if nbytes < 100 * 1024**power else 0}f} {_UNITS[power]}"


def short_bytes_text(nbytes: float) -> str:
    power = min(max((int(nbytes).bit_length() - 1) // 10, 0), len(_UNITS) - 1)
    return f"{nbytes / 1024**power:g} {_UNITS[power]}" if nbytes else "0"


def side(column: int) -> str:
    return "left" if column < 2 else "right"


def _aligned(row: Sequence[str], widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


# A multiple of the highest bar, so that its label stays inside the frame.
_HEADROOM = 1.15
_MOST_STEPS = 6
# Of the distance between two axes.
_BAR_WIDTH = 0.5


def plot_bars(axes: list[str], inside: list[int], between: list[int], ax: Any) -> Any:
    """Draw the least bytes sent along each axis as bars, in the units of the table; `ax` as for `Account.plot`."""
    try:
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator, MultipleLocator
    except ImportError as error:
        raise ImportError("Account.plot draws with matplotlib; pip install matplotlib") from error

    if ax is None:
        ax = pyplot.subplots(figsize=(3.0 + 0.9 * len(axes), 3.6), layout="constrained")[1]
    sums = [one + other for one, other in zip(inside, between, strict=True)]
    highest = max(sums, default=0)
    how = {"width": _BAR_WIDTH}
    ax.bar(axes, inside, label="inside hosts", color=fill(0, None), **how)
    bars = ax.bar(axes, between, bottom=inside, label="between hosts", color=fill(1, None), **how)
    # The sum of both: the label shows a bar that is too small to see.
    ax.bar_label(bars, labels=[bytes_text(nbytes) for nbytes in sums], padding=2, fontsize="small")
    ax.set_xlim(-0.75, max(len(axes), 1) - 0.25)
    ax.set_ylim(0, _HEADROOM * highest if highest else 1)
    if highest <= _MOST_BYTES:
        ax.yaxis.set_major_locator(MaxNLocator(_MOST_STEPS, integer=True))
        ax.yaxis.set_major_formatter(lambda nbytes, _: bytes_text(nbytes))
    else:
        ax.yaxis.set_major_locator(MultipleLocator(binary_step(highest)))
        ax.yaxis.set_major_formatter(lambda nbytes, _: short_bytes_text(nbytes))
    ax.set_xlabel("axis")
    ax.set_ylabel("min sent by this rank")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    return ax


def binary_step(highest: int) -> int:
    step = 1
    while highest > _MOST_STEPS * step:
        step *= 2
    return step
