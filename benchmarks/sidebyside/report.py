"""Write what was measured: as JSON, and as a section of a Markdown page."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from statistics import median
from typing import Any

from sidebyside.options import new_file

_PAGE = """\
# Results

Each section names its command. The speed of a shared machine drifts: compare within a section, not between sections,
and prefer the ratios to the times.
"""


def duration(seconds: float) -> str:
    """Return seconds with three digits and a fitting unit.

    Example:
        >>> duration(0.0000123)
        '12.3 us'
    """
    for unit, per_second in (("us", 1e6), ("ms", 1e3)):
        if seconds * per_second < 999.5:
            return f"{_three_digits(seconds * per_second)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def median_and_least(times: Sequence[float]) -> str:
    """Return the median of some durations and, in brackets, the least."""
    return f"{duration(median(times))} ({duration(min(times))})"


def size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that divides it; nothing for none."""
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % unit_bytes == 0:
            return f"{nbytes // unit_bytes} {unit}"
    return f"{nbytes} B" if nbytes else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table; all but the first columns are numbers."""
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where results go."""
    parser.add_argument("--json", metavar="PATH", type=new_file, help="write everything that was measured to this file")
    parser.add_argument(
        "--markdown", metavar="PATH", type=new_file, help="put the section into this page, in place of its like"
    )


def publish(
    args: argparse.Namespace,
    title: str,
    machine: dict[str, str],
    body: str,
    results: Any,
    launcher: Sequence[str] = ("python",),
) -> None:
    """Print the section, and write what the options of `add_output_options` ask for."""
    title = f"{title}, on {_short(machine['CPU'])}"
    threads = os.environ.get("OMP_NUM_THREADS")
    variables = [f"OMP_NUM_THREADS={threads}"] if threads and launcher[0] == "meshrun" else []
    command = shlex.join([*variables, *launcher, *sys.argv])
    section = f"## {title}\n\nMeasured on {date.today()} with `{command}` {on_machine(machine)}.\n\n{body}\n"
    print(section)
    if args.json:
        args.json.write_text(json.dumps({"title": title, "machine": machine, "results": results}, indent=1) + "\n")
    if args.markdown:
        page = args.markdown.read_text() if args.markdown.exists() else _PAGE
        args.markdown.write_text(with_section(page, title, section))


def on_machine(machine: dict[str, str]) -> str:
    """Return the end of a sentence that names the machine and the versions.

    Example:
        >>> on_machine({"CPU": "Intel(R) Xeon(R) Processor", "cores": "2", "kernel": "Linux 6.18"})
        'on 2 cores of an Intel Xeon, kernel Linux 6.18'
    """
    versions = [f"{name} {value}" for name, value in machine.items() if name not in ("CPU", "cores")]
    return ", ".join([f"on {machine['cores']} cores of an {_short(machine['CPU'])}", *versions])


def _short(processor: str) -> str:
    """Return the name of a processor without what is not its name: `Intel Xeon`, not `Intel(R) Xeon(R) Processor`."""
    return re.sub(r"\((R|TM)\)| (CPU|Processor)\b.*", "", processor).strip()


def with_section(page: str, title: str, section: str) -> str:
    """Return the page with its section of this title replaced, or with a new one at the end."""
    old = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if old.search(page):
        page = old.sub(lambda _: section + "\n", page)
    else:
        page = f"{page.rstrip()}\n\n{section}"
    return page.rstrip() + "\n"
