"""Parse and format sizes, and write the table of a measurement."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from meshdist.backends.base import Choice
from meshdist.bench.measuring import Row
from meshdist.system.digits import three_digits
from meshdist.system.terminal import fold
from meshdist.system.versions import versions

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+) *([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return a size in bytes: `8`, `64K`, `64KiB` and `64kb` are accepted, with powers of 1024.

    Raises:
        ValueError: The text is not a size, or 0.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"expected a size above 0, such as 8, 64K, 16M or 1G, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def series(begin: int, end: int, factor: float) -> list[int]:
    """Return sizes from `begin` to `end`, each `factor` times the one before; `end` is the last."""
    sizes, size = [], float(begin)
    while round(size) < end:
        sizes.append(round(size))
        size *= factor
    return [*dict.fromkeys(sizes), end]


def show_size(num_bytes: int) -> str:
    """Return a size in the largest unit that divides it."""
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % unit_bytes == 0:
            return f"{num_bytes // unit_bytes} {unit}"
    return f"{num_bytes} B"


_HEAD = (
    ("size", "count", "calls", "median", "min", "p90", "algbw", "busbw", "wrong"),
    ("", "elements", "", "us", "us", "us", "GB/s", "GB/s", "elements"),
)
# The last characters of the columns; those of terminals that are narrower than the table, of 80 characters.
_ENDS = (12, 25, 34, 47, 60, 73, 84, 95, 106)
_NARROW_ENDS = (9, 19, 26, 36, 46, 55, 63, 71, 80)

_LEGEND = """\
Each time is that of one call on the slowest rank; calls shorter than 100 us are timed in batches. algbw is
size / median time; busbw counts the bytes that the busiest rank must send instead, so it can be compared with the speed
of memory or network for any number of ranks."""


def legend(width: int) -> str:
    """Return what the columns are, in lines of at most `width` characters; 0 is any width."""
    is_narrow = 0 < width < max(map(len, _LEGEND.split("\n")))
    return fold(_LEGEND.replace("\n", " "), width, hanging=0) if is_narrow else _LEGEND


def head(title: str, width: int = 0) -> str:
    """Return the head of the table of one operation, for a terminal of `width` characters; 0 is any width."""
    return "\n".join([fold(title, width), *(_line(cells, width) for cells in _HEAD)])


def line(row: Row, width: int = 0) -> str:
    """Return a row of the table; `width` as for its head."""
    times = [three_digits(time) for time in (row.median_us, row.min_us, row.p90_us)]
    speeds = [f"{speed:.2f}" if row.num_bytes else "" for speed in (row.algorithm_gbps, row.bus_gbps)]
    size, count = (show_size(row.num_bytes), str(row.elements)) if row.num_bytes else ("", "")
    wrong = "-" if row.wrong is None else str(row.wrong)
    return _line((size, count, str(row.iterations), *times, *speeds, wrong), width)


def lines_of_ways(choice: Choice) -> Iterator[str]:
    """Return the rows of the table for one kind of call: its ways, the fastest first, and which was chosen."""
    chosen = None if choice.chosen is None else choice.ways[choice.chosen]
    size = show_size(choice.most_bytes)
    if not choice.seconds:
        yield _row_of_ways(size, "", f"{chosen} (remembered)")
    for way, seconds in sorted(choice.seconds.items(), key=lambda item: item[1]):
        remarks = ["chosen"] * (way == chosen) + ["default"] * (way == choice.ways[0])
        if way == chosen and seconds > min(choice.seconds.values()):
            remarks[-1] += f": at most {choice.worthwhile - 1:.0%} longer than the fastest"
        yield _row_of_ways(size, three_digits(1e6 * seconds), f"{way} ({', '.join(remarks)})" if remarks else way)
        size = ""


def tables_of_ways(choices: Sequence[Choice]) -> Iterator[str]:
    """Return a table for each kind of call among the choices."""
    for title in dict.fromkeys(choice.title for choice in choices):
        rows = [row for choice in choices if choice.title == title for row in lines_of_ways(choice)]
        yield "\n".join([title, _row_of_ways("up to", "us", "algorithm"), *rows])


def _row_of_ways(size: str, micros: str, way: str) -> str:
    return f"{size:>10}  {micros:>9}  {way}"


def write_csv(path: Path, rows: Sequence[Row], job: Mapping[str, Any]) -> None:
    """Write the rows, each with the common settings."""
    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([*job, *Row._fields])
    writer.writerows([[*job.values(), *row] for row in rows])
    _overwrite(path, text.getvalue())


def write_json(path: Path, rows: Sequence[Row], job: Mapping[str, Any]) -> None:
    """Write the rows, the common settings, and the machine."""
    everything = {"machine": versions(), "job": dict(job), "results": [row._asdict() for row in rows]}
    _overwrite(path, json.dumps(everything, indent=1) + "\n")


def _overwrite(path: Path, text: str) -> None:
    # One write over the old content: if this process is killed, the file has the old or the new content.
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.write(file, text.encode())
        with suppress(OSError):  # a pipe cannot be truncated
            os.ftruncate(file, len(text.encode()))
    finally:
        os.close(file)


def _line(cells: Sequence[str], width: int) -> str:
    text = ""
    for cell, end in zip(cells, _NARROW_ENDS if 0 < width < _ENDS[-1] else _ENDS, strict=True):
        # A cell that is wider than its column takes the place of spaces before the next one.
        text += " " * bool(text) + cell.rjust(end - len(text) - bool(text))
    return text.rstrip()
