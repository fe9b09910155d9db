"""The drawing of who waits for whom: a box for ranks that wait alike, an arrow to each box of ranks they wait for."""

from __future__ import annotations

import math
from pathlib import PurePath
from textwrap import shorten
from typing import Any

from meshdist.debug.wait_graph import Waits, failed_call, kind_of
from meshdist.runtime.rank_text import ranks_text

_MOST_CALLS = 12
_COLOURS = {
    "raised": "#993322",
    "gone": "#666666",
    "absent": "#dd5544",
    "cycle": "#ee9944",
    "waits": "#5588bb",
    "failed": "#8866aa",
    "begins": "#55aaaa",
    "computes": "#77aa77",
    "unknown": "#aaaaaa",
}
_NAMES = {
    "raised": "ended by an exception",
    "gone": "gone",
    "absent": "not in the call",
    "cycle": "deadlock",
    "waits": "waiting",
    "failed": "call failed",
    "begins": "in a call without a record",
    "computes": "computing",
    "unknown": "no record",
}
_LONGEST_LINE = 60
_MOST_NAMED = 4
# Between two boxes, and of the text in one.
_GAP_IN, _CHARACTER_IN = 0.9, 0.085
# The boxes are on a circle of radius 1, which is drawn as an ellipse: boxes are wider than high.
_MARGIN, _FLAT, _LOWEST_IN = 0.5, 0.6, 1.4


def draw_waits(waits: Waits, ax: Any = None) -> Any:
    """Draw who waits for whom, and return the axes.

    Ranks that wait in the same call for the same ranks share a box, so that a job of any size is a small picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_drawable()
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    boxes = ranks_alike(waits)
    names = ["\n".join([ranks_text(ranks, most=_MOST_NAMED), *_lines_of(waits, ranks)]) for ranks in boxes]
    kinds = [kind_of(waits, ranks[0]) for ranks in boxes]
    arrows = _arrows(waits, boxes)
    calls = sorted(set(arrows.values()))
    places = _places(len(boxes))
    left, right = (side(x for x, _ in places) + margin for side, margin in ((min, -_MARGIN), (max, _MARGIN)))
    bottom, top = (side(y for _, y in places) + margin for side, margin in ((min, -_MARGIN), (max, _MARGIN)))
    if ax is None:
        from matplotlib import pyplot

        # As large as the boxes need. The legend is below the figure: `savefig` with bbox_inches="tight" includes it.
        box_in = _GAP_IN + _CHARACTER_IN * max((len(line) for name in names for line in name.split("\n")), default=0)
        radius_in = box_in * max(2.0, 1 + len(boxes) / math.pi) / 3
        sizes = radius_in * (right - left), max(_LOWEST_IN, _FLAT * radius_in * (top - bottom))
        ax = pyplot.figure(figsize=sizes).add_axes((0, 0, 1, 1))
    texts = [
        ax.text(
            *place,
            name,
            ha="center",
            va="center",
            color="white",
            bbox={"boxstyle": "round,pad=0.4", "facecolor": _COLOURS[kind], "edgecolor": "none"},
        )
        for place, name, kind in zip(places, names, kinds, strict=True)
    ]
    for (start, end), words in arrows.items():
        ax.annotate(
            "",
            places[end],
            places[start],
            arrowprops={
                "arrowstyle": "-|>",
                "color": f"C{calls.index(words) % 10}",
                "connectionstyle": "arc3,rad=0.12",
                "patchA": texts[start].get_bbox_patch(),
                "patchB": texts[end].get_bbox_patch(),
                "linewidth": 1.5,
            },
        )
    legend: list[Any] = [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in _COLOURS if kind in kinds]
    legend += [Line2D([], [], color=f"C{n % 10}", label=words) for n, words in enumerate(calls[:_MOST_CALLS])]
    if legend:
        ax.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, 0.0), fontsize="small", frameon=False)
    ax.set(xlim=(left, right), ylim=(bottom, top))
    ax.set_axis_off()
    return ax


def ranks_alike(waits: Waits) -> list[list[int]]:
    """Return the ranks, those together that are of one kind and wait in the same calls for the same ranks."""
    graph = waits.graph
    alike: dict[Any, list[int]] = {}
    size = max((state.world_size for state in waits.states.values()), default=0)
    for rank in sorted({*graph, *range(size)}):
        waited = frozenset((other, call.words) for _, other, call in graph.out_edges([rank], data="call"))
        kind = kind_of(waits, rank)
        alike.setdefault((kind, waited, *_ending_of(waits, rank, kind)), []).append(rank)
    return list(alike.values())


def _ending_of(waits: Waits, rank: int, kind: str) -> list[str]:
    """Return how a rank has ended: its exception, or its call that failed, and where; nothing for others."""
    if kind == "gone":
        return [shorten(waits.gone[rank], _LONGEST_LINE, placeholder=" …")]
    if kind not in ("raised", "failed"):
        return []
    state = waits.states[rank]
    if state.raised is not None:
        return [shorten(state.raised.error, _LONGEST_LINE, placeholder=" …"), *_place(state.place)]
    call = failed_call(state)
    return [] if call is None else [shorten(call.text, _LONGEST_LINE, placeholder=" …"), *_place(call.site)]


def _arrows(waits: Waits, boxes: list[list[int]]) -> dict[tuple[int, int], str]:
    """Return the call of each pair of a waiting and an awaited box; ranks of one box may wait for each other."""
    box_of = {rank: number for number, ranks in enumerate(boxes) for rank in ranks}
    arrows: dict[tuple[int, int], str] = {}
    for rank, other, call in waits.graph.edges(data="call"):
        if box_of[rank] != box_of[other]:
            arrows.setdefault((box_of[rank], box_of[other]), call.words)
    return arrows


def _lines_of(waits: Waits, ranks: list[int]) -> list[str]:
    """Return how the ranks of a box have ended, or where they are in their own code, such as `at train.py:7`."""
    kind = kind_of(waits, ranks[0])
    if kind not in ("absent", "begins", "computes"):
        return _ending_of(waits, ranks[0], kind)  # the legend has the calls of those that wait
    places = sorted({line for rank in ranks if rank in waits.states for line in _place(waits.states[rank].place)})
    return places if len(places) < 2 else [f"{places[0]}, …"]


def _place(place: str | None) -> list[str]:
    return [] if place is None else [f"at {PurePath(place.rpartition(' in ')[0] or place).name}"]


def _places(count: int) -> list[tuple[float, float]]:
    """Return a place for each box: side by side for two, else on a circle."""
    if count == 1:
        return [(0.0, 0.0)]
    angles = [math.pi - 2 * math.pi * number / count for number in range(count)]
    return [(math.cos(angle), math.sin(angle) if count > 2 else 0.0) for angle in angles]


def check_drawable() -> None:
    """Raise ImportError if matplotlib or networkx is not installed."""
    try:
        import matplotlib  # noqa: F401
        import networkx  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"drawing who is waiting for whom needs matplotlib: pip install matplotlib ({error})"
        ) from None
