"""Volumes as a table of text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdist.profiler.accounting import Volume

_HEAD = ("axis", "collective", "calls", "bytes", "sent inside hosts", "sent between hosts")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Up to here bytes are written out.
_MOST_BYTES = 9999


def volume_table(volumes: dict[str, dict[str, Volume]], total: Volume) -> str:
    """Return a table with a row for each axis and collective, and one for all."""
    return text_table(_rows(volumes, total))


def volume_html(volumes: dict[str, dict[str, Volume]], total: Volume) -> str:
    """Return the same table as HTML."""
    return html_table(_rows(volumes, total))


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the head, as text: two columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(_aligned(row, widths)).rstrip() for row in rows)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the same as HTML."""
    head, *others = rows
    lines = ["".join(f'<th style="text-align:{side(k)}">{escape(cell)}</th>' for k, cell in enumerate(head))]
    lines += [
        "".join(f'<td style="text-align:{side(k)}">{escape(cell)}</td>' for k, cell in enumerate(row)) for row in others
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes as people read it.

    Example:
        >>> bytes_text(1000), bytes_text(3 << 20)
        ('1000 B', '3.00 MiB')
    """
    if nbytes <= _MOST_BYTES:
        return f"{nbytes:.0f} B"
    power = min((int(nbytes).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{nbytes / 1024**power:.{2 if nbytes < 100 * 1024**power else 0}f} {_UNITS[power]}"


def short_bytes_text(nbytes: float) -> str:
    """Return a multiple of a power of two as people read it.

    Example:
        >>> short_bytes_text(0), short_bytes_text(512), short_bytes_text(1 << 20), short_bytes_text(3 << 29)
        ('0', '512 B', '1 MiB', '1.5 GiB')
    """
    power = min(max((int(nbytes).bit_length() - 1) // 10, 0), len(_UNITS) - 1)
    return f"{nbytes / 1024**power:g} {_UNITS[power]}" if nbytes else "0"


def _rows(volumes: dict[str, dict[str, Volume]], total: Volume) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [_HEAD]
    rows += [(axis, name, *_cells(volume)) for axis, found in volumes.items() for name, volume in found.items()]
    return [*rows, ("all", "", *_cells(total))]


def side(column: int) -> str:
    """Return to which side a column of a table is aligned."""
    return "left" if column < 2 else "right"


def _cells(volume: Volume) -> tuple[str, str, str, str]:
    return str(volume.calls), *map(bytes_text, (volume.nbytes, volume.inside, volume.between))  # type: ignore[return-value]


def _aligned(row: Sequence[str], widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
