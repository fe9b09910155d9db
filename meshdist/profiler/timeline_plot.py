"""Draw a timeline: a band for each rank, a bar for each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.profiler.call_matching import pairs
from meshdist.profiler.event import Track
from meshdist.system.palette import fill

_WAITING = "#ffffff"
_BAND = 0.8


def plot_timeline(tracks: Sequence[Track], ax: Any = None) -> Any:
    try:
        from matplotlib import pyplot
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("Timeline.plot draws with matplotlib; pip install matplotlib") from error

    if ax is None:
        ax = pyplot.subplots(figsize=(9.0, 1.2 + 0.5 * len(tracks)), layout="constrained")[1]
    zero_ns = min(track.begin_ns for track in tracks)
    unit_ns, unit = _unit(max(track.end_ns for track in tracks) - zero_ns)
    groups = {event.group: None for track in tracks for event in track.events}
    colours = {group: fill(number, None) for number, group in enumerate(groups)}
    for row, track in enumerate(tracks):
        _draw_rank(ax, row, track, zero_ns, unit_ns, colours)
    rows = {track.rank: row for row, track in enumerate(tracks)}
    for sent, received in pairs(tracks):
        begin, end = (sent.begin_ns - zero_ns) / unit_ns, (received.end_ns - zero_ns) / unit_ns
        ax.annotate(
            "",
            (end, rows[sent.peer] if sent.peer is not None else 0),
            (begin, rows[received.peer] if received.peer is not None else 0),
            arrowprops={"arrowstyle": "->", "color": "#444444", "shrinkA": 0, "shrinkB": 0},
        )
    ax.set_yticks(range(len(tracks)), [f"rank {track.rank}" for track in tracks])
    ax.set_ylim(len(tracks) - 0.4, -0.6)  # rank 0 above
    ax.set_xlabel(unit)
    handles = [Patch(facecolor=colour, label=group) for group, colour in colours.items()]
    handles.append(Patch(facecolor=_WAITING, edgecolor="#888888", hatch="////", label="waiting"))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


def _draw_rank(ax: Any, row: int, track: Track, zero_ns: int, unit_ns: float, colours: dict[str, str]) -> None:
    for is_async in (False, True):
        # Async calls are half as high, below the sync calls.
        place = (row, _BAND / 2) if is_async else (row - _BAND / 2, _BAND)
        events = [event for event in track.events if event.is_async == is_async]
        spans = [((event.begin_ns - zero_ns) / unit_ns, (event.end_ns - event.begin_ns) / unit_ns) for event in events]
        ax.broken_barh(spans, place, facecolors=[colours[event.group] for event in events], edgecolor="none")
    waits = [
        ((event.begin_ns - zero_ns) / unit_ns, event.wait_ns / unit_ns)
        for event in track.events
        if event.waits_for is not None and event.wait_ns
    ]
    hatched = {"facecolors": _WAITING, "edgecolor": "#888888", "hatch": "////", "linewidth": 0.0}
    ax.broken_barh(waits, (row - _BAND / 2, _BAND), **hatched)


def _unit(duration_ns: int) -> tuple[float, str]:
    return next(
        (size, name) for size, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")) if duration_ns >= size or size == 1e3
    )
