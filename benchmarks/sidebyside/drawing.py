"""Draw what was compared: how many times as fast as the fastest other library, by size; a panel for each collective."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidebyside import report
from sidebyside.libraries import LIBRARIES, OVER_MPI, SHARED
from sidebyside.rounds import ratio

_MOST_PANELS = 6
_ACROSS = 3
# Those that most programs wait for, first.
_FIRST = (
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "broadcast",
    "all_to_all_single",
    "send_recv",
)
# Cases that are not named after one call.
_SHOWN = {"send_recv": "send and recv"}
_COLOURS = ("#c2410c", "#1d4ed8", "#0f766e", "#7c3aed")
_FASTER, _SLOWER = "#e8f5e9", "#fdecea"
_TITLE_PT, _LABEL_PT = 14, 12
# The ticks of a ratio that lie in the picture are shown.
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Point:
    """The ratio of one case: the time of the fastest other library divided by that of meshdist."""

    collective: str
    ranks: int
    nbytes: int
    ratio: float


def points_of(results: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the ratios of results of `compare.py`, as they stand in its JSON."""
    points = []
    for result in results:
        times = result["times"]
        own = next((name for name in ("meshdist", OVER_MPI.name) if name in times), None)
        others = [name for name in times if name not in (own, SHARED.name)]
        if own is not None and others and result["nbytes"]:
            found = ratio(times, others, own)
            points.append(Point(result["collective"], result["ranks"], result["nbytes"], found))
    return points


def points_of_page(page: str, processor: str) -> list[Point]:
    """Return the ratios in the tables of collectives of a page that `compare.py --markdown` wrote.

    Args:
        page: Its text.
        processor: Of the sections, as it stands in their heads.

    Raises:
        ValueError: The page has no such table.
    """
    heads = rf"^## Collectives, (\d+) ranks, on {re.escape(processor)}\n(.*?)(?=^## |\Z)"
    points = []
    for ranks, section in re.findall(heads, page, re.MULTILINE | re.DOTALL):
        head, _, *rows = [_cells(line) for line in section.splitlines() if line.startswith("|")]
        column = head.index(f"the fastest other / {LIBRARIES[0].title}")
        points += [
            Point(row[0], int(ranks), _nbytes(row[1]), float(row[column]))
            for row in rows
            if row[0] != "geometric mean" and row[1] and row[column]
        ]
    if not points:
        raise ValueError(f"no section 'Collectives, N ranks, on {processor}' has a table of ratios")
    return points


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _nbytes(size: str) -> int:
    number, unit = size.split()
    return int(number) * {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]


def draw(path: Path, points: Sequence[Point], processor: str = "") -> None:
    """Draw ratios by size, a line for each number of ranks; above 1, meshdist is faster.

    Args:
        path: Where the picture goes; .svg, .png or .pdf.
        points: The ratios; at least one.
        processor: On which they were measured, for the title.
    """
    from matplotlib.figure import Figure

    names = sorted({point.collective for point in points}, key=_place)[:_MOST_PANELS]
    ranks = sorted({point.ranks for point in points})
    drawn = [point for point in points if point.collective in names]
    across = min(_ACROSS, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(3.7 * across, 2.75 * down + 0.9), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharey=True).ravel()
    # With space above and below the lines, for words.
    limits = min([0.5, *(0.65 * point.ratio for point in drawn)]), max([2.0, *(1.6 * point.ratio for point in drawn)])
    for axes, name in zip(panels, names, strict=False):
        _panel(axes, [point for point in drawn if point.collective == name], ranks, limits)
        axes.set_title(_SHOWN.get(name, name), fontsize=_TITLE_PT)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    where = f", on {processor}" if processor else ""
    figure.suptitle(f"Time of the fastest other library / time of meshdist{where}", fontsize=_TITLE_PT)
    figure.supylabel("ratio of the times", fontsize=_LABEL_PT)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=_LABEL_PT, frameon=False, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, points: Sequence[Point], ranks: Sequence[int], limits: tuple[float, float]) -> None:
    sizes = sorted({point.nbytes for point in points})
    axes.set_yscale("log")
    axes.set(xlim=(-0.3, len(sizes) - 0.7), ylim=limits)
    axes.axhspan(1, limits[1], color=_FASTER, linewidth=0, zorder=0)
    axes.axhspan(limits[0], 1, color=_SLOWER, linewidth=0, zorder=0)
    axes.axhline(1, color="#333333", linewidth=1.2)
    for number, colour in zip(ranks, _COLOURS * len(ranks), strict=False):
        of_ranks = sorted((sizes.index(point.nbytes), point.ratio) for point in points if point.ranks == number)
        if of_ranks:
            axes.plot(*zip(*of_ranks, strict=True), color=colour, linewidth=2.4, marker="o", label=f"{number} ranks")
    axes.text(-0.2, limits[1] / 1.07, "meshdist is faster", va="top", fontsize=_LABEL_PT - 1, color="#2e7d32")
    axes.text(-0.2, limits[0] * 1.07, "meshdist is slower", va="bottom", fontsize=_LABEL_PT - 1, color="#c62828")
    axes.set_xticks(range(len(sizes)), [report.size(nbytes).replace(" ", "\n") for nbytes in sizes])
    axes.set_yticks([tick for tick in _TICKS if limits[0] <= tick <= limits[1]])
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axes.minorticks_off()
    axes.tick_params(labelsize=_LABEL_PT)
    axes.grid(visible=True, axis="y", alpha=0.3)


def _place(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST)), name
