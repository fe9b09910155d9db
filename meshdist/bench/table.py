"""What was measured, for people: a table that grows row by row; and for programs: CSV and JSON."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from meshdist._version import __version__
from meshdist.bench.measuring import Row
from meshdist.bench.sizes import show_size
from meshdist.systems import available_cores

_HEAD = (
    ("size", "count", "calls", "median", "min", "p99", "algbw", "busbw", "wrong"),
    ("", "elements", "", "us", "us", "us", "GB/s", "GB/s", "elements"),
)
_WIDTHS = (12, 11, 7, 11, 11, 11, 9, 9, 9)

LEGEND = """\
A time is that of a call on the slowest rank. algbw is size / median time; busbw counts the bytes instead that the
busiest rank has to send, so it can be compared with the speed of memory or network whatever the number of ranks."""


def machine() -> dict[str, str]:
    """Return what a measurement here is made on: processor, cores, kernel, and versions."""
    return {
        "CPU": _cpu_model(),
        "cores": _cores(),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "meshdist": __version__,
    }


def _cores() -> str:
    # A launcher may have bound this rank to some of them.
    mine, all_ = available_cores(), os.cpu_count() or 1
    return f"{mine} of {all_}" if mine < all_ else str(all_)


def head(title: str) -> str:
    """Return what stands above the rows of one operation."""
    return "\n".join([title, *map(_line, _HEAD)])


def line(row: Row) -> str:
    """Return one row.

    Example:
        >>> line(Row("all_reduce", 4096, 1024, 100, 3.141, 2.5, 12.0, 1.304, 1.304, 0)).split()
        ['4', 'KiB', '1024', '100', '3.14', '2.50', '12.0', '1.30', '1.30', '0']
    """
    times = [_digits(time) for time in (row.median_us, row.min_us, row.p99_us)]
    speeds = [f"{speed:.2f}" if row.num_bytes else "" for speed in (row.algorithm_gbps, row.bus_gbps)]
    size, count = (show_size(row.num_bytes), str(row.elements)) if row.num_bytes else ("", "")
    return _line((size, count, str(row.iterations), *times, *speeds, "-" if row.wrong is None else str(row.wrong)))


def write_csv(path: Path, rows: Sequence[Row], job: Mapping[str, Any]) -> None:
    """Write the rows, and in each what all have in common."""
    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([*job, *Row._fields])
    writer.writerows([[*job.values(), *row] for row in rows])
    _overwrite(path, text.getvalue())


def write_json(path: Path, rows: Sequence[Row], job: Mapping[str, Any]) -> None:
    """Write the rows, what they have in common, and the machine."""
    everything = {"machine": machine(), "job": dict(job), "results": [row._asdict() for row in rows]}
    _overwrite(path, json.dumps(everything, indent=1) + "\n")


def _overwrite(path: Path, text: str) -> None:
    # In one go, over what is there: whenever this process is killed, there is what it wrote the last time, or this.
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.write(file, text.encode())
        with suppress(OSError):  # a pipe has no end to be set
            os.ftruncate(file, len(text.encode()))
    finally:
        os.close(file)


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def _digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 999.95 else f"{number:.0f}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
