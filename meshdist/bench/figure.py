"""The plots of a measurement: time and bus bandwidth by size, and the time of each algorithm of a call."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from meshdist.backends.base import Choice
from meshdist.bench.measuring import Row
from meshdist.bench.results import show_size

FORMATS = (".png", ".svg", ".pdf")


def problem_with(path: Path) -> str | None:
    """Return why no plot can be written to `path`, and what to do; None if it can."""
    if find_spec("matplotlib") is None:
        return "needs matplotlib: pip install matplotlib"
    if path.suffix not in FORMATS:
        return f"must end in {', '.join(FORMATS)}, got {str(path)!r}"
    return None


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw time and bus bandwidth by size, a line for each operation; both on logarithmic scales."""
    from matplotlib import colormaps  # a slow import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    time, speed = figure.subplots(1, 2)
    # tab20 alternates strong and pale colours: use the strong ones first.
    colors = [colormaps["tab20"](shade) for shade in (*range(0, 20, 2), *range(1, 20, 2))]
    names = list(dict.fromkeys(row.collective for row in rows if row.num_bytes))
    for number, name in enumerate(names):
        color = colors[number % len(colors)]
        own = [row for row in rows if row.collective == name]
        sizes = [row.num_bytes for row in own]
        time.loglog(sizes, [row.median_us for row in own], marker="o", markersize=3, color=color, label=name)
        time.fill_between(sizes, [row.min_us for row in own], [row.p99_us for row in own], color=color, alpha=0.15)
        speed.loglog(sizes, [row.bus_gbps for row in own], marker="o", markersize=3, color=color)
    for axes, label in ((time, "time of a call, us (median; band: min to p99)"), (speed, "bus bandwidth, GB/s")):
        axes.set_xlabel("size")
        axes.set_title(label, fontsize=10)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: show_size(int(size)))
        axes.tick_params(axis="x", labelrotation=45)
    if names:
        figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=150)


def draw_choices(path: Path, choices: Sequence[Choice], title: str) -> None:
    """Draw the time of each algorithm by size, a picture for each kind of call; the chosen ones have a circle."""
    from matplotlib.figure import Figure

    measured = [choice for choice in choices if choice.seconds]
    kinds = list(dict.fromkeys(choice.kind for choice in measured))
    figure = Figure(figsize=(8, 0.6 + 3.2 * max(1, len(kinds))), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for number, kind in enumerate(kinds):
        axes = figure.add_subplot(len(kinds), 1, number + 1)
        own = [choice for choice in measured if choice.kind == kind]
        for way in dict.fromkeys(way for choice in own for way in choice.seconds):
            times = {choice.most_bytes: 1e6 * choice.seconds[way] for choice in own if way in choice.seconds}
            axes.loglog(times.keys(), times.values(), marker=".", label=way)
        fastest = {c.most_bytes: 1e6 * c.seconds[c.ways[c.chosen]] for c in own if c.chosen is not None}
        axes.loglog(
            fastest.keys(), fastest.values(), "o", markersize=9, fillstyle="none", color="black", label="chosen"
        )
        axes.set_title(f"{kind}: time of a call, us", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: show_size(int(size)))
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
