"""Draw a timeline: a band for each rank, a bar for each call, arrows from senders to receivers.

Sync calls fill the upper part of a band. Async calls overlap them: they have an outline, and lanes of their own below.
A bar has the colour of its call and group, or of its call alone where these are too many, and its name in or beside it
where it fits and no arrow crosses it. All names are of one size, and all bars of a call have the same name, with the
group or without. The usual calls have the same colours in all pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any

from meshdist.profiler.call_matching import pairs
from meshdist.profiler.event import Event, Track
from meshdist.profiler.summary import duration_text
from meshdist.system.drawing_style import NUM_COLOURS, PLAIN, fill, legend_beside

# Thin lines over the colour of a bar, which remains. Not over a translucent white: SVG files would have pale lines too.
_WAITING: dict[str, Any] = {"edgecolor": "#555555", "hatch": "////", "linewidth": 0.0}
_HATCH_PT = 0.5
_OUTLINE = "#333333"
_ARROW: dict[str, Any] = {"color": "#555555", "alpha": 0.75, "linewidth": 0.7}
_OTHERS = "other calls"
# The last colour is that of the calls beyond this number, the quickest ones.
_MOST_KINDS = NUM_COLOURS - 1

# The calls that have a colour of their own, in the order of the palette: calls that often occur together differ. In a
# picture, the first in this order takes the colour.
_CALLS_BY_COLOUR = (
    ("all_reduce", "all_reduce_coalesced", "reduce"),
    ("isend", "send", "send_object", "send_object_list", "isend_object_list"),
    ("irecv", "recv", "recv_object", "recv_object_list", "irecv_object_list"),
    ("broadcast", "broadcast_object_list", "scatter"),
    ("all_gather_into_tensor", "all_gather", "all_gather_object", "gather"),
    ("barrier", "monitored_barrier"),
    ("reduce_scatter_tensor", "reduce_scatter", "sendrecv", "sendrecv_object", "halo_exchange"),
    ("all_to_all_single", "all_to_all", "shift"),
)

# Of the height of a rank, 1.
_BAND = 0.84
_ASYNC_PART = 0.4  # of the band, where the rank has async calls
_MOST_LANES = 4

_WIDTH_IN = 10.0
_FONT_PT = 8.0
_SMALLEST_PT = 6.0
_LETTER = 0.62  # the mean width of a letter, in font sizes
_APART_PT = 4.0  # from a name beside a bar to what comes next
_LINE = 1.25  # the height of a line of text, in font sizes
_LEAST_WIDTH = 0.0025  # of a bar, as a share of the axis: shorter calls are drawn so wide

# First calls, which set up their groups, are left out if they would take more than this share of the axis.
_MOST_SETUP = 0.5


def plot_timeline(tracks: Sequence[Track], ax: Any = None, arrows: int = 40) -> Any:
    try:
        from matplotlib import pyplot, rc_context
    except ImportError as error:
        raise ImportError("Timeline.plot draws with matplotlib; pip install matplotlib") from error

    is_own = ax is None
    if is_own:
        height_in = 1.5 + min(max(0.62, 0.2 + 2.4 / len(tracks)), 0.9) * len(tracks)
        ax = pyplot.subplots(figsize=(_WIDTH_IN, height_in), layout="constrained")[1]
    with rc_context({"hatch.linewidth": _HATCH_PT}):
        _Plot(tracks, ax).draw(max(arrows, 0), legend_below=is_own)
    return ax


@dataclass
class _Bar:
    event: Event
    row: int
    begin: float  # in the unit of the axis, like `width`
    width: float
    top: float
    height: float


@dataclass
class _Name:
    """The name of a call at its bar; `side` of the text is at `x`."""

    bar: _Bar
    text: str
    x: float
    side: str
    over_arrow: bool = False


class _Plot:
    def __init__(self, tracks: Sequence[Track], ax: Any) -> None:
        self._tracks = tracks
        self._ax = ax
        self._zero_ns = min(track.begin_ns for track in tracks)
        end_ns = max(track.end_ns for track in tracks)
        self._duration_ns = max(end_ns - self._zero_ns, 1)
        self._setup_ns = _setup_end_ns(tracks) - self._zero_ns
        if self._setup_ns <= _MOST_SETUP * self._duration_ns:
            self._setup_ns = 0
        self._shown_ns = max(self._duration_ns - self._setup_ns, 1)
        self._unit_ns, self._unit = _unit(self._shown_ns)
        events = [event for track in tracks for event in track.events]
        self._has_groups = len({event.group for event in events}) > 1
        self._colours_groups = len({self._name(event) for event in events}) <= _MOST_KINDS
        self._colours = self._colours_of_kinds()
        self._arrows: list[tuple[tuple[float, float], tuple[float, float]]] = []  # their ends, as they are drawn
        self._bars = [bar for row, track in enumerate(tracks) for bar in self._laid_out(row, track)]

    def draw(self, arrows: int, legend_below: bool) -> None:
        ax, tracks = self._ax, self._tracks
        ax.set_xlim(self._setup_ns / self._unit_ns, self._duration_ns / self._unit_ns)
        ax.set_ylim(len(tracks) - 0.5, -0.5)  # rank 0 above
        ax.set_yticks(range(len(tracks)), [f"rank {track.rank}" for track in tracks])
        ax.tick_params(axis="y", length=0)
        setup = duration_text(self._setup_ns / 1e9)
        left_out = f"; left out: the first {setup}, in which groups are set up" if self._setup_ns else ""
        ax.set_xlabel(f"time ({self._unit}){left_out}")
        share = sum(track.share_since(self._zero_ns + self._setup_ns) for track in tracks) / len(tracks)
        ranks = "1 rank" if len(tracks) == 1 else f"{len(tracks)} ranks"
        ax.set_title(
            f"{ranks}, {duration_text(self._shown_ns / 1e9)}; {share:.0%} of the time in communication",
            fontsize="medium",
            loc="left",
        )
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        for row in range(len(tracks)):
            ax.axhspan(row - _BAND / 2, row + _BAND / 2, color="#f5f5f5", linewidth=0, zorder=0)
        for bar in self._bars:
            self._draw_bar(bar)
        shown, num_messages = self._draw_arrows(arrows)
        self._draw_legend(shown, num_messages, legend_below)
        self._draw_names()

    def _name(self, event: Event) -> str:
        return f"{event.name} ({event.group})" if self._has_groups else event.name

    def _kind(self, event: Event) -> str:
        """Return what has a colour of its own."""
        return self._name(event) if self._colours_groups else event.name

    def _colours_of_kinds(self) -> dict[str, str]:
        """Return the colour of each kind of call; if there are too many, the quickest kinds have none."""
        seconds: dict[str, int] = {}
        for track in self._tracks:
            for event in track.events:
                kind = self._kind(event)
                seconds[kind] = seconds.get(kind, 0) + event.end_ns - event.begin_ns
        longest = sorted(seconds, key=lambda kind: -seconds[kind])[:_MOST_KINDS]
        shown = [kind for kind in seconds if kind in longest]  # as they came
        chosen = colours_of(shown)
        return {kind: fill(chosen[kind], None) for kind in shown}

    def _colour(self, event: Event) -> str:
        return self._colours.get(self._kind(event), fill(_MOST_KINDS, None))

    def _laid_out(self, row: int, track: Track) -> list[_Bar]:
        lanes = _lanes(track.events)
        num_lanes = min(max(lanes, default=0), _MOST_LANES)
        sync_height = _BAND * (1 - _ASYNC_PART) if num_lanes else _BAND
        lane_height = (_BAND - sync_height) / max(num_lanes, 1)
        bars = []
        for event, lane in zip(track.events, lanes, strict=True):
            if event.end_ns - self._zero_ns <= self._setup_ns:
                continue
            top, height = row - _BAND / 2, sync_height
            if lane:
                top, height = top + sync_height + (lane - 1) % _MOST_LANES * lane_height, 0.88 * lane_height
            begin, width = (event.begin_ns - self._zero_ns), event.end_ns - event.begin_ns
            bars.append(_Bar(event, row, begin / self._unit_ns, width / self._unit_ns, top, height))
        return bars

    def _draw_bar(self, bar: _Bar) -> None:
        from matplotlib.patches import Rectangle

        event = bar.event
        # An outline would hide short calls.
        shown = self._shown_ns / self._unit_ns
        edge = (_OUTLINE if event.is_async else "#ffffff") if bar.width > 0.004 * shown else "none"
        colours: dict[str, Any] = {"facecolor": self._colour(event), "edgecolor": edge, "linewidth": 0.6}
        width = self._drawn_width(bar)
        # The short ones are in front: a longer neighbour that begins within their least width would hide them.
        zorder = 2 if width == bar.width else 2.5
        self._ax.add_patch(Rectangle((bar.begin, bar.top), width, bar.height, zorder=zorder, **colours))
        if event.waits_for is not None:
            waited = event.late_ns / self._unit_ns
            self._ax.add_patch(
                Rectangle((bar.begin, bar.top), waited, bar.height, facecolor="none", zorder=3, **_WAITING)
            )

    def _drawn_width(self, bar: _Bar) -> float:
        return max(bar.width, _LEAST_WIDTH * self._shown_ns / self._unit_ns)

    def _draw_arrows(self, most: int) -> tuple[int, int]:
        """Draw the messages that took longest, over the bars and below their names; return how many of how many."""
        place = {id(message): bar for bar in self._bars for message in bar.event.parts or (bar.event,)}
        between = [
            (place[id(sent)], place[id(received)])
            for sent, received in pairs(self._tracks)
            if id(sent) in place and id(received) in place
        ]
        between = [(sent, received) for sent, received in between if sent.row != received.row]
        between.sort(key=lambda ends: ends[0].begin - ends[1].begin - ends[1].width)
        for sent, received in between[:most]:
            is_down = sent.row < received.row
            begin = (sent.begin, sent.top + (sent.height if is_down else 0))
            end = (received.begin + received.width, received.top + (0 if is_down else received.height))
            look = {"arrowstyle": "-|>", "mutation_scale": 5, "shrinkA": 0, "shrinkB": 0, **_ARROW}
            drawn = self._ax.annotate("", end, begin, arrowprops=look, zorder=3.5)
            drawn.arrow_patch.set_clip_box(self._ax.bbox)  # it may begin before the visible time
            self._arrows.append((begin, end))
        return min(most, len(between)), len(between)

    def _draw_legend(self, shown: int, num_messages: int, below: bool) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list[Any] = [Patch(facecolor=colour, label=kind) for kind, colour in self._colours.items()]
        events = [bar.event for bar in self._bars]
        if any(self._kind(event) not in self._colours for event in events):
            handles.append(Patch(facecolor=fill(_MOST_KINDS, None), label=_OTHERS))
        if any(event.waits_for is not None for event in events):
            handles.append(Patch(label="waiting for another rank", facecolor=PLAIN, **_WAITING))
        if any(event.is_async for event in events):
            handles.append(
                Patch(facecolor="none", edgecolor=_OUTLINE, label="async call (outlined, below the sync calls)")
            )
        if shown:
            which = "message" if shown == num_messages else f"message (the longest {shown} of {num_messages})"
            handles.append(Line2D([], [], marker=">", markersize=4, markevery=[1], label=which, **_ARROW))
            handles[-1].set_data([0, 1], [0, 0])
        if not handles:
            return
        if below:
            columns = min(len(handles), 4)
            where = {"loc": "outside lower left", "ncols": columns}
            self._ax.figure.legend(handles=handles, frameon=False, fontsize="small", **where)
        else:
            legend_beside(self._ax, handles)

    def _draw_names(self) -> None:
        """Write the names of the calls into their bars, or beside bars that are too short."""
        ax = self._ax
        ax.figure.canvas.figure.draw_without_rendering()  # the layout decides the size of the axes
        window, points = ax.get_window_extent(), 72.0 / ax.figure.dpi
        per_point = self._shown_ns / self._unit_ns / (window.width * points)
        height = window.height * points / len(self._tracks)
        lanes: dict[tuple[int, float], list[_Bar]] = {}
        for bar in self._bars:
            lanes.setdefault((bar.row, bar.top), []).append(bar)
        largest = {key: lane[0].height * height / _LINE for key, lane in lanes.items()}
        high = [lane for key, lane in lanes.items() if largest[key] >= _SMALLEST_PT]
        most = min([_FONT_PT, *(points for points in largest.values() if points >= _SMALLEST_PT)])
        # The size of all names: a smaller one only if clearly more names fit in.
        by_size = {size: self._names_of(high, size, per_point, height) for size in {most, _SMALLEST_PT}}
        size = max(by_size, key=lambda size: (len(by_size[size]) * size, size))
        for name in by_size[size]:
            self._write_name(name, size)

    def _names_of(self, lanes: Sequence[Sequence[_Bar]], size: float, per_point: float, height: float) -> list[_Name]:
        """Return the names that fit, in one size; all with their groups, or all without."""

        def placed(with_group: bool) -> list[_Name]:
            return [name for lane in lanes for name in self._placed(lane, with_group, size, per_point, height)]

        short = placed(with_group=False)
        # With the groups, if they fit at least half the bars that have room for the names alone.
        whole = placed(with_group=True) if self._has_groups else []
        return whole if 2 * len(whole) >= len(short) else short

    def _placed(
        self, lane: Sequence[_Bar], with_group: bool, size: float, per_point: float, height: float
    ) -> Iterator[_Name]:
        """Yield the names that fit in a lane; a point is `per_point` units of time, a rank has a height of so many."""
        first, last = self._ax.get_xlim()
        free_from, tall = first, _LINE * size / height
        for bar, following in zip_longest(lane, lane[1:]):
            begin, end = max(bar.begin, first), min(bar.begin + self._drawn_width(bar), last)
            free_to = last if following is None else following.begin
            text = self._name(bar.event) if with_group else bar.event.name
            width = (len(text) * _LETTER * size + 2) * per_point
            beside = width + _APART_PT * per_point
            if width <= end - begin:
                yield self._inside(bar, text, width, tall, (begin, end))
            elif beside <= free_to - end and not self._is_crossed(bar, end, width, tall):
                yield _Name(bar, text, end + per_point, "left")
                end += beside
            elif beside <= begin - free_from and not self._is_crossed(bar, begin - width, width, tall):
                yield _Name(bar, text, begin - per_point, "right")
            free_from = max(free_from, end)

    def _inside(self, bar: _Bar, text: str, width: float, tall: float, ends: tuple[float, float]) -> _Name:
        """Return a name in its bar: in the middle, or where no arrow crosses it, or else over the arrow."""
        begin, end = ends
        middle = (begin + end) / 2
        lefts = (middle - width / 2, begin, end - width)
        free = [left for left in lefts if not self._is_crossed(bar, left, width, tall)]
        return _Name(bar, text, (free[0] if free else lefts[0]) + width / 2, "center", over_arrow=not free)

    def _is_crossed(self, bar: _Bar, left: float, width: float, tall: float) -> bool:
        """Return whether an arrow crosses a name at the height of a bar: `width` units of time, `tall` ranks."""
        from matplotlib.path import Path
        from matplotlib.transforms import Bbox

        middle = bar.top + bar.height / 2
        box = Bbox.from_extents(left, middle - tall / 2, left + width, middle + tall / 2)
        return any(Path(ends).intersects_bbox(box, filled=False) for ends in self._arrows)

    def _write_name(self, name: _Name, size: float) -> None:
        bar = name.bar
        how: dict[str, Any] = {
            "fontsize": size,
            "color": "#111111",
            "va": "center_baseline",
            "clip_on": True,
            "zorder": 4,
        }
        # Only its colour behind the letters.
        if name.side == "center" and (bar.event.waits_for is not None or name.over_arrow):
            how["bbox"] = {"facecolor": self._colour(bar.event), "edgecolor": "none", "pad": 1.0}
        self._ax.text(name.x, bar.top + bar.height / 2, name.text, ha=name.side, **how)


def colours_of(kinds: Sequence[str]) -> dict[str, int]:
    """Return the number of a colour for each kind of call, which is a name, perhaps with a group: `send (dp)`.

    It does not depend on the order of the kinds.
    """
    usual = {name: (place, number) for number, names in enumerate(_CALLS_BY_COLOUR) for place, name in enumerate(names)}
    chosen: dict[str, int] = {}
    free = list(range(_MOST_KINDS))
    known = [(*usual[kind.split(" ")[0]], kind) for kind in kinds if kind.split(" ")[0] in usual]
    for _, number, kind in sorted(known):
        if number in free:
            chosen[kind] = number
            free.remove(number)
    others = sorted(kind for kind in kinds if kind not in chosen)
    return {**chosen, **dict(zip(others, free, strict=False))}


def _lanes(events: Sequence[Event]) -> list[int]:
    """Return the lane of each event: 0 for sync calls; the first one that is free, from 1 on, for async calls."""
    ends: list[int] = []
    lanes = []
    for event in events:
        if not event.is_async:
            lanes.append(0)
            continue
        lane = next((number for number, end in enumerate(ends) if end <= event.begin_ns), len(ends))
        ends[lane : lane + 1] = [event.end_ns]
        lanes.append(lane + 1)
    return lanes


def _setup_end_ns(tracks: Sequence[Track]) -> int:
    """Return when the last rank has ended the calls at its beginning that set up groups; 0 if there are none."""
    firsts = (takewhile(lambda event: event.sets_up, track.events) for track in tracks)
    return max((event.end_ns for events in firsts for event in events), default=0)


def _unit(duration_ns: int) -> tuple[float, str]:
    return next(
        (size, name) for size, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")) if duration_ns >= size or size == 1e3
    )
