"""Draw what was compared: the time of a call by size, a panel for each collective and a line for each library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sidebyside import report

_MOST_PANELS = 6
# Those that most programs wait for, first.
_FIRST = (
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "broadcast",
    "all_to_all_single",
    "send_recv",
)
_STYLES = {
    "meshdist": ("#c2410c", "-", 2.4),
    "meshdist-shared": ("#c2410c", ":", 2.4),
    "meshdist-mpi": ("#c2410c", "--", 2.0),
    "torch": ("#6b7280", "-", 1.6),
    "openmpi": ("#1d4ed8", "-", 1.6),
    "mpich": ("#0f766e", "-", 1.6),
}


def draw(path: Path, results: Sequence[dict[str, Any]], titles: Mapping[str, str]) -> None:
    """Draw results of `compare.py`, on logarithmic scales; a row of panels for each number of ranks.

    Args:
        path: Where the picture goes; .svg, .png or .pdf.
        results: As they stand in its JSON.
        titles: What each library is called.
    """
    from matplotlib.figure import Figure

    moving = [result for result in results if result["nbytes"]]
    names = sorted({result["collective"] for result in moving}, key=_place)[:_MOST_PANELS]
    ranks = sorted({result["ranks"] for result in moving})
    if not names:
        raise ValueError("nothing that was measured has a size: there is nothing to draw")
    rows = [(number, names[begin : begin + 3]) for number in ranks for begin in range(0, len(names), 3)]
    figure = Figure(figsize=(3.6 * min(3, len(names)), 2.9 * len(rows) + 0.4), layout="constrained")
    for row, panels in zip(rows, figure.subplots(len(rows), min(3, len(names)), squeeze=False), strict=True):
        for place, axes in enumerate(panels):
            if place < len(row[1]):
                mine = [each for each in moving if (each["ranks"], each["collective"]) == (row[0], row[1][place])]
                _panel(axes, mine, titles)
                axes.set_title(f"{row[1][place]}, {row[0]} ranks", fontsize=9)
            else:
                axes.set_axis_off()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # Above the panels, where no line runs through it.
    figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside upper center", ncols=len(labels))
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, results: Sequence[dict[str, Any]], titles: Mapping[str, str]) -> None:
    for name, title in titles.items():
        points = sorted(
            (each["nbytes"], 1e6 * median(each["times"][name])) for each in results if name in each["times"]
        )
        if points:
            color, line, width = _STYLES[name]
            sizes, times = zip(*points, strict=True)
            axes.loglog(sizes, times, line, color=color, linewidth=width, marker=".", markersize=4, label=title)
    sizes = sorted({each["nbytes"] for each in results})
    axes.set_xticks(sizes, [report.size(nbytes) for nbytes in sizes], fontsize=7, rotation=35, ha="right")
    axes.minorticks_off()
    axes.set_ylabel("us per call", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(visible=True, alpha=0.25)


def _place(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST)), name
