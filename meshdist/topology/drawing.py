"""Drawing a topology: the tree, the root on top, with networkx and matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshdist.topology.graphs import graph_of
from meshdist.topology.link import Link
from meshdist.topology.part import Part

SHAPES = {"network": "s", "host": "s", "socket": "o", "switch": "D", "gpu": "o"}
MOST_RANKS = 4
MOST_TEXTS = 24


def draw_parts(parts: Sequence[Part], ax: Any) -> Any:
    """Draw the parts on matplotlib axes, and return those; see `Topology.draw`."""
    try:
        import matplotlib
        import networkx as nx
    except ImportError as error:
        raise ImportError(
            f"Topology.draw needs matplotlib and networkx: pip install matplotlib networkx ({error})"
        ) from None
    places = positions(parts)
    if ax is None:
        from matplotlib import pyplot

        width = max(4.0, 0.9 * (1 + max(x for x, _ in places.values())))
        ax = pyplot.subplots(figsize=(min(width, 40.0), 4.8))[1]
    graph = graph_of(parts)
    colors = _colors(parts, matplotlib.colormaps["tab10"])
    for kind, shape in SHAPES.items():
        names = [part.name for part in parts if part.kind == kind]
        if names:
            shown = [colors[name] for name in names]
            nx.draw_networkx_nodes(
                graph, places, names, node_color=shown, node_shape=shape, node_size=500, edgecolors="black", ax=ax
            )
    linked = [part for part in parts if part.link is not None]
    edges = [(part.parent, part.name) for part in linked]
    widths = [width_of(part) for part in linked]
    nx.draw_networkx_edges(graph, places, edges, width=widths, edge_color="0.6", ax=ax)
    texts = {(part.parent, part.name): str(part.link).replace(", ", "\n") for part in first_of_their_like(linked)}
    if len(texts) <= MOST_TEXTS:
        nx.draw_networkx_edge_labels(graph, places, texts, font_size=6, rotate=False, ax=ax)
    for part in parts:
        _write(label(part), places[part.name], ax)
    across, down = zip(*places.values(), strict=True)
    ax.set_xlim(min(across) - 0.7, max(across) + 0.7)
    ax.set_ylim(min(down) - 0.6, max(down) + 0.3)
    ax.set_axis_off()
    return ax


def _write(text: str, place: tuple[float, float], ax: Any) -> None:
    """Write the label of a part under it, over the links."""
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    below = {"textcoords": "offset points", "ha": "center", "va": "top"}
    ax.annotate(text, place, (0, -14), fontsize=7, bbox=behind, **below)


def first_of_their_like(linked: Sequence[Part]) -> list[Part]:
    """Return the first of the parts with equal links to the same parent: what is written there holds for the others."""
    first: dict[tuple[str | None, Link | None], Part] = {}
    for part in linked:
        first.setdefault((part.parent, part.link), part)
    return list(first.values())


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
