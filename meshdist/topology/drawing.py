"""Drawing a topology: the tree, the root on top, with networkx and matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshdist.topology.folding import folded
from meshdist.topology.graphs import graph_of
from meshdist.topology.link import Link
from meshdist.topology.part import Part

SHAPES = {"network": "s", "host": "s", "socket": "o", "switch": "D", "gpu": "o"}
# The colours of links, darker than those of parts.
LINKS = ("#888888", "#5577aa", "#aa7744", "#558855", "#885577")
MOST_RANKS = 4
# Inches: of a leaf, and of a level of the tree. A page is some 10 wide: what is wider is shown smaller.
LEAF, LEVEL = 0.6, 1.3
FONT = 8
# Labels stand on links.
BEHIND = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def draw_parts(parts: Sequence[Part], ax: Any) -> Any:
    """Draw the parts on matplotlib axes, and return those; see `Topology.draw`."""
    try:
        import matplotlib
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

        # The labels of hosts that stand for others are wider than a leaf.
        size = (max(6.0, LEAF * (2 + max(across))), 1.6 + LEVEL * (0.6 - min(down)))
        ax = pyplot.subplots(figsize=(min(size[0], 40.0), size[1]), layout="constrained")[1]
    graph = graph_of(shown)
    colors = _colors(shown, matplotlib.colormaps["tab10"])
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
    ax.set_xlim(min(across) - 1.0, max(across) + 1.0)
    ax.set_ylim(min(down) - 0.5, max(down) + 0.3)
    ax.set_axis_off()
    return ax


def _write(text: str, place: tuple[float, float], has_children: bool, ax: Any) -> None:
    """Write the label of a part: beside it where links leave it downwards, else under it."""
    if has_children:
        where: dict[str, Any] = {"xytext": (14, 0), "ha": "left", "va": "center"}
    else:
        where = {"xytext": (0, -14), "ha": "center", "va": "top"}
    ax.annotate(text, place, textcoords="offset points", fontsize=FONT, bbox=BEHIND, **where)


def families_of(linked: Sequence[Part]) -> dict[tuple[str, Link], list[Part]]:
    """Return the parts by what their links have in common: what they lead from, as words, and how fast they are.

    Example:
        >>> from meshdist.topology import Topology
        >>> parts = [part for part in Topology.uniform(2, 2, gpus=2).parts if part.link is not None]
        >>> [(what, len(members)) for (what, _), members in families_of(parts).items()]
        [('host', 2), ('gpu', 4)]
    """
    families: dict[tuple[str, Link], list[Part]] = {}
    for part in linked:
        if part.link is not None:
            families.setdefault((part.kind, part.link), []).append(part)
    return families


def _draw_legend(families: Mapping[tuple[str, Link], Sequence[Part]], ax: Any) -> None:
    """Say how fast the links of each family are, below the tree."""
    from matplotlib.lines import Line2D

    if not families:
        return
    handles = [
        Line2D([], [], color=LINKS[number % len(LINKS)], linewidth=width_of(members[0]), label=f"each {kind}: {link}")
        for number, ((kind, link), members) in enumerate(families.items())
    ]
    ax.legend(
        handles=handles,
        title="links upwards",
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=min(3, len(handles)),
        fontsize=FONT,
        title_fontsize=FONT,
        frameon=False,
    )


def label(part: Part) -> str:
    r"""Return the text under a part: its name inside its host, and its ranks.

    Example:
        >>> label(Part("node/gpu0", "gpu", ranks=(0, 1, 2, 3, 4)))
        'gpu0\nranks 0, 1, 2, 3, ...'
    """
    name = part.name.rpartition("/")[2]
    if not part.ranks:
        return name
    more = ", ..." if len(part.ranks) > MOST_RANKS else ""
    return f"{name}\nrank{'s' * (len(part.ranks) > 1)} {', '.join(map(str, part.ranks[:MOST_RANKS]))}{more}"


def positions(parts: Sequence[Part]) -> dict[str, tuple[float, float]]:
    """Return where to put each part: leaves side by side, the others above the middle of theirs."""
    children: dict[str, list[str]] = {}
    depth: dict[str, int] = {}
    for part in parts:
        depth[part.name] = 0 if part.parent is None else depth[part.parent] + 1
        if part.parent is not None:
            children.setdefault(part.parent, []).append(part.name)
    across: dict[str, float] = {}
    leaves = 0
    for part in parts:  # parents come before children, so leaves are met from the left to the right
        if part.name not in children:
            across[part.name] = float(leaves)
            leaves += 1
    for part in reversed(parts):
        below = children.get(part.name)
        if below:
            across[part.name] = (across[below[0]] + across[below[-1]]) / 2
    return {name: (across[name], -float(depth[name])) for name in depth}


def width_of(part: Part) -> float:
    """Return how wide to draw the link of a part: a little wider for twice the bandwidth."""
    bandwidth = part.link.bandwidth if part.link is not None else 1.0
    return min(10.0, max(0.5, 1.0 + 0.8 * math.log2(bandwidth / 1e9)))


def _colors(parts: Sequence[Part], palette: Any) -> Mapping[str, Any]:
    """Return a colour for each part: one for each host and what is in it, in turns."""
    colors: dict[str, Any] = {}
    num_hosts = 0
    for part in parts:
        if part.kind == "host":
            colors[part.name] = palette(num_hosts % palette.N)
            num_hosts += 1
        else:
            colors[part.name] = "lightgrey" if part.parent is None or part.kind == "network" else colors[part.parent]
    return colors
