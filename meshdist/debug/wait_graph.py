"""Draw who waits for whom."""

from __future__ import annotations

import math
from typing import Any

from meshdist.debug.waits import Waits

_MOST_LABELS = 12
_COLOURS = {"gone": "#888888", "absent": "#dd5544", "cycle": "#ee9944", "waits": "#5588bb", "computes": "#77aa77"}


def draw_waits(waits: Waits, ax: Any = None) -> Any:
    """Draw the ranks in a circle with an arrow from each waiting rank to each awaited one, and return the axes.

    Args:
        waits: Who waits for whom.
        ax: matplotlib axes; new ones where None.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_drawable()
    import networkx as nx
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    graph = waits.graph
    if ax is None:
        from matplotlib import pyplot

        side = max(5.0, 0.9 * math.sqrt(len(graph)) + 3.0)
        ax = pyplot.subplots(figsize=(side + 3.0, side), layout="constrained")[1]
    places = nx.circular_layout(graph)
    kinds = {rank: kind_of(waits, rank) for rank in graph}
    calls = sorted({call.words for _, _, call in graph.edges(data="call")})
    edge_colours = [f"C{calls.index(call.words) % 10}" for _, _, call in graph.edges(data="call")]
    nx.draw_networkx(
        graph,
        places,
        ax=ax,
        node_color=[_COLOURS[kinds[rank]] for rank in graph],
        edge_color=edge_colours,
        node_size=500,
        font_color="white",
        connectionstyle="arc3,rad=0.08",
    )
    legend: list[Any] = [Patch(color=_COLOURS[kind], label=kind) for kind in _COLOURS if kind in kinds.values()]
    legend += [Line2D([], [], color=f"C{n % 10}", label=words) for n, words in enumerate(calls[:_MOST_LABELS])]
    if legend:
        ax.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, 0.0), fontsize="small", frameon=False)
    ax.set_axis_off()
    return ax


def check_drawable() -> None:
    """Raise ImportError if matplotlib or networkx is not installed."""
    try:
        import matplotlib  # noqa: F401
        import networkx  # noqa: F401
    except ImportError as error:
        raise ImportError(f"drawing who waits for whom needs matplotlib: pip install matplotlib ({error})") from None


def kind_of(waits: Waits, rank: int) -> str:
    if rank in waits.gone:
        return "gone"
    if rank in waits.absent:
        return "absent"
    if rank in waits.cycle:
        return "cycle"
    return "waits" if waits.graph.out_degree(rank) else "computes"
