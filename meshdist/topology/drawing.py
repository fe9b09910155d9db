"""Draw the tree of a topology, the root on top, with networkx and matplotlib; many equal hosts become one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshdist.runtime.rank_text import ranks_text
from meshdist.system.drawing_style import PLAIN, fill
from meshdist.topology.graphs import graph_of
from meshdist.topology.part import Link, Part

SHAPES = {"network": "s", "host": "s", "socket": "o", "switch": "D", "gpu": "o"}
# The colours of links, darker than those of parts.
LINKS = ("#888888", "#5577aa", "#aa7744", "#558855", "#885577")
MOST_RANKS = 4
# Inches: the width of a leaf and the height of a level of the tree.
LEAF, LEVEL = 0.6, 1.15
FONT = 10
# Labels are drawn over links.
BEHIND = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def draw_parts(parts: Sequence[Part], ax: Any) -> Any:
    try:
        import matplotlib  # noqa: F401
        import networkx as nx
    except ImportError as error:
        raise ImportError(
            f"Topology.draw needs matplotlib and networkx: pip install matplotlib networkx ({error})"
        ) from None
    shown, stands_for = folded(parts)
    places = positions(shown)
    across, down = zip(*places.values(), strict=True)
    if ax is None:
        from matplotlib import pyplot

        # Labels of hosts that represent several are wider than a leaf.
        size = (max(6.0, LEAF * (2 + max(across))), 1.6 + LEVEL * (0.6 - min(down)))
        ax = pyplot.subplots(figsize=(min(size[0], 40.0), size[1]), layout="constrained")[1]
    graph = graph_of(shown)
    colors = _colors(shown)
    families = families_of([part for part in shown if part.link is not None])
    for number, (_, members) in enumerate(families.items()):
        edges = [(part.parent, part.name) for part in members]
        style = {"width": width_of(members[0]), "edge_color": [LINKS[number % len(LINKS)]] * len(edges)}
        nx.draw_networkx_edges(graph, places, edges, ax=ax, **style)
    for kind, shape in SHAPES.items():
        names = [part.name for part in shown if part.kind == kind]
        if names:
            fills = [colors[name] for name in names]
            nx.draw_networkx_nodes(
                graph, places, names, node_color=fills, node_shape=shape, node_size=500, edgecolors="black", ax=ax
            )
    for part in shown:
        has_children = any(other.parent == part.name for other in shown)
        _write(stands_for.get(part.name) or label(part), places[part.name], has_children, ax)
    _draw_legend(families, ax)
    ax.set_xlim(min(across) - 0.7, max(across) + 0.7)
    ax.set_ylim(min(down) - 0.5, max(down) + 0.3)
    ax.set_axis_off()
    return ax


def _write(text: str, place: tuple[float, float], has_children: bool, ax: Any) -> None:
    if has_children:
        where: dict[str, Any] = {"xytext": (14, 0), "ha": "left", "va": "center"}
    else:
        where = {"xytext": (0, -14), "ha": "center", "va": "top"}
    ax.annotate(text, place, textcoords="offset points", fontsize=FONT, bbox=BEHIND, **where)


def families_of(linked: Sequence[Part]) -> dict[tuple[str, Link], list[Part]]:
    families: dict[tuple[str, Link], list[Part]] = {}
    for part in linked:
        if part.link is not None:
            families.setdefault((part.kind, part.link), []).append(part)
    return families


def _draw_legend(families: Mapping[tuple[str, Link], Sequence[Part]], ax: Any) -> None:
    from matplotlib.lines import Line2D

    if not families:
        return
    handles = [
        Line2D([], [], color=LINKS[number % len(LINKS)], linewidth=width_of(members[0]), label=f"each {kind}: {link}")
        for number, ((kind, link), members) in enumerate(families.items())
    ]
    ax.legend(
        handles=handles,
        title="links to the part above",
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=min(3, len(handles)),
        fontsize=FONT,
        title_fontsize=FONT,
        frameon=False,
    )


def label(part: Part) -> str:
    name = part.name.rpartition("/")[2]
    return f"{name}\n{ranks_text(part.ranks, most=MOST_RANKS)}" if part.ranks else name


def positions(parts: Sequence[Part]) -> dict[str, tuple[float, float]]:
    """Return the position of each part: leaves side by side, other parts centred above their children."""
    children: dict[str, list[str]] = {}
    depth: dict[str, int] = {}
    for part in parts:
        depth[part.name] = 0 if part.parent is None else depth[part.parent] + 1
        if part.parent is not None:
            children.setdefault(part.parent, []).append(part.name)
    across: dict[str, float] = {}
    leaves = 0
    for part in parts:  # parents come before children, so leaves appear from left to right
        if part.name not in children:
            across[part.name] = float(leaves)
            leaves += 1
    for part in reversed(parts):
        below = children.get(part.name)
        if below:
            across[part.name] = (across[below[0]] + across[below[-1]]) / 2
    return {name: (across[name], -float(depth[name])) for name in depth}


def width_of(part: Part) -> float:
    bandwidth = part.link.bandwidth if part.link is not None else 1.0
    return min(10.0, max(0.5, 1.0 + 0.8 * math.log2(bandwidth / 1e9)))


def _colors(parts: Sequence[Part]) -> Mapping[str, str]:
    """Return a colour for each part: one per host and the parts inside it."""
    colors: dict[str, str] = {}
    num_hosts = 0
    for part in parts:
        if part.kind == "host":
            colors[part.name] = fill(num_hosts, None)
            num_hosts += 1
        else:
            colors[part.name] = PLAIN if part.parent is None or part.kind == "network" else colors[part.parent]
    return colors


# Up to this many equal hosts are drawn individually.
MOST_EQUAL = 4


class Folded(NamedTuple):
    """The parts to draw, and the label of each host that represents several equal ones."""

    parts: list[Part]
    stands_for: dict[str, str]


def folded(parts: Sequence[Part]) -> Folded:
    """Return the parts with equal hosts folded: more than four on one network with equal links become one."""
    within = _parts_within(parts)
    alike: dict[Any, list[str]] = {}
    for name, below in within.items():
        alike.setdefault(_kind_of(below), []).append(name)
    dropped: set[str] = set()
    stands_for = {}
    for names in alike.values():
        if len(names) > MOST_EQUAL:
            first = within[names[0]]
            dropped.update(part.name for name in names[1:] for part in within[name])
            stands_for[names[0]] = f"{names[0]} … {names[-1]}\n{len(names)} hosts, each {_contents(first)}"
    return Folded([part for part in parts if part.name not in dropped], stands_for)


def _parts_within(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Return each host's own part and the parts below it. A host linked to a host is a part of that host."""
    top: dict[str, str] = {}
    within: dict[str, list[Part]] = {}
    for part in parts:
        above = top.get(part.parent or "")
        if above is None and part.kind == "host":
            above = part.name
        if above is not None:
            top[part.name] = above
            within.setdefault(above, []).append(part)
    return within


def _kind_of(below: Sequence[Part]) -> tuple[Any, ...]:
    """Return a key that is equal for hosts drawn alike."""
    place = {part.name: number for number, part in enumerate(below)}
    return tuple(
        (part.kind, place.get(part.parent or "", part.parent), part.link, part.memory, len(part.ranks), part.cores)
        for part in below
    )


def _contents(below: Sequence[Part]) -> str:
    counts: dict[str, int] = {}
    for part in below[1:]:
        counts[part.kind] = counts.get(part.kind, 0) + 1
    if not counts:
        return f"{len(below[0].ranks)} rank{'s' * (len(below[0].ranks) != 1)}"
    return ", ".join(f"{count} {kind}{'es' if kind == 'switch' else 's'}" for kind, count in counts.items())
