"""The plots of a measurement: time and bus bandwidth by size, and the time of each algorithm of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from meshdist.backends.base import Choice
from meshdist.bench.measuring import Row
from meshdist.bench.results import show_size
from meshdist.system.drawing_style import PLOT_FORMATS


def problem_with(path: Path) -> str | None:
    """Return why no plot can be written to `path`, and what to do; None if it can."""
    if find_spec("matplotlib") is None:
        return "needs matplotlib: pip install matplotlib"
    if path.suffix not in PLOT_FORMATS:
        return f"must end in {', '.join(PLOT_FORMATS)}, got {str(path)!r}"
    return None


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw each operation by size: median and 90th percentile of its time, and its bus bandwidth below."""
    from matplotlib.figure import Figure  # a slow import

    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.num_bytes:  # a barrier has no sizes
            by_name.setdefault(row.collective, []).append(row)
    across = math.ceil(math.sqrt(len(by_name))) or 1
    down = math.ceil(len(by_name) / across) or 1
    figure = Figure(figsize=(1.0 + 4.4 * across, 1.1 + 4.2 * down), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.add_gridspec(2 * down, across, height_ratios=(2, 1) * down)
    every = sorted({row.num_bytes for own in by_name.values() for row in own})
    times = [micros for own in by_name.values() for row in own for micros in (row.median_us, row.p90_us)]
    bandwidths = [row.bus_gbps for own in by_name.values() for row in own if row.bus_gbps > 0]
    for number, (name, own) in enumerate(by_name.items()):
        line, column = divmod(number, across)
        latency = figure.add_subplot(grid[2 * line, column])
        bandwidth = figure.add_subplot(grid[2 * line + 1, column], sharex=latency)
        sizes, how = [row.num_bytes for row in own], {"color": f"C{number % 10}", "markersize": 3}
        latency.loglog(sizes, [row.median_us for row in own], marker="o", **how)
        latency.loglog(sizes, [row.p90_us for row in own], linestyle="--", linewidth=1, **how)
        bandwidth.loglog(sizes, [row.bus_gbps for row in own], marker="o", **how)
        latency.set_title(name, fontsize=10)
        # Panels of equal scales can be compared.
        for axes, words, values in ((latency, "latency (us)", times), (bandwidth, "bus GB/s", bandwidths)):
            axes.set_ylabel(words, fontsize=_LABEL_PT)
            if values:
                axes.set_ylim(min(values) / _MARGIN, max(values) * _MARGIN)
            axes.set_xlim(every[0] / _MARGIN, every[-1] * _MARGIN)
            _label_axes(axes, sizes)
        latency.tick_params(labelbottom=False)
        latency.set_xlabel("")
    _legend(figure)
    figure.savefig(path, dpi=150)


def _legend(figure: Any) -> None:
    """Explain the lines below the panels: inside, a legend would hide the end of a line."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=_ANY_CALL, marker="o", markersize=3, label="median"),
        Line2D([], [], color=_ANY_CALL, linestyle="--", linewidth=1, label="90th percentile"),
    ]
    figure.legend(handles=lines, frameon=False, fontsize=_TICK_PT, loc="outside lower center", ncols=2)


_ANY_CALL = "#444444"
_MARGIN = 1.5
_LABEL_PT, _TICK_PT = 9, 8


# Labels of more sizes, evenly spaced, would touch each other in a panel.
_MOST_LABELS = 24
_LEAST_STEP = 0.75
# The ticks of a decade, by how far apart the values are at most; those of a larger span have the powers of ten alone.
_SUBS = ((10.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)), (1000.0, (1.0, 2.0, 5.0)))


def _label_axes(axes: Any, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    _label_sizes(axes, sizes)
    lowest, highest = axes.get_ylim()
    subs = next((subs for most, subs in _SUBS if highest < most * lowest), (1.0,))
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", alpha=0.3)


def _label_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """Put ticks at the measured sizes, with labels where these do not touch, from the largest one on."""
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log", base=2)
    steps = sorted(math.log2(larger / size) for size, larger in pairwise(sizes))
    # The last size may be nearer to the one before than the others are to each other.
    usual = steps[len(steps) // 2] if steps else 0.0
    gap = max(math.log2(sizes[-1] / sizes[0]) / _MOST_LABELS, _LEAST_STEP * usual)
    labelled = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if math.log2(labelled[-1] / size) >= gap:
            labelled.append(size)
    # Long labels, centred, would reach their neighbours.
    along: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(labelled, [show_size(size) for size in labelled], **along)
    axes.minorticks_off()
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([size for size in sizes if size not in labelled], minor=True)
    axes.tick_params(labelsize=_TICK_PT)
    axes.set_xlabel("message size", fontsize=_LABEL_PT)


def draw_choices(path: Path, choices: Sequence[Choice], title: str) -> None:
    """Draw the time of each algorithm by size, a picture for each kind of call; the chosen ones have a circle."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    measured = [choice for choice in choices if choice.seconds]
    kinds = list(dict.fromkeys(choice.title for choice in measured))
    ways = dict.fromkeys(way for choice in measured for way in choice.ways)
    colours = dict(zip(ways, cycle(colormaps["tab20"](range(20)))))
    figure = Figure(figsize=(8, 0.6 + 3.2 * max(1, len(kinds))), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for number, kind in enumerate(kinds):
        axes = figure.add_subplot(len(kinds), 1, number + 1)
        own = [choice for choice in measured if choice.title == kind]
        for way in dict.fromkeys(way for choice in own for way in choice.seconds):
            times = {choice.most_bytes: 1e6 * choice.seconds[way] for choice in own if way in choice.seconds}
            axes.loglog(times.keys(), times.values(), marker=".", label=way, color=colours[way])
        fastest = {c.most_bytes: 1e6 * c.seconds[c.ways[c.chosen]] for c in own if c.chosen is not None}
        axes.loglog(
            fastest.keys(), fastest.values(), "o", markersize=9, fillstyle="none", color="black", label="chosen"
        )
        axes.set_title(kind, fontsize=10)
        axes.set_ylabel("latency (us)", fontsize=_LABEL_PT)
        _label_axes(axes, sorted({choice.most_bytes for choice in own}))
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
