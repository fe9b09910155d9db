"""Topologies as networkx graphs.

A node is a part, under its name, with the attributes `kind` ("network", "host", "socket", "switch" or "gpu"), `ranks`
(the global ranks on it; optional), `memory_latency_s` and `memory_bandwidth` (between these ranks), and `cores`. An
edge is a link, with `latency_s` in seconds and `bandwidth` in bytes per second, in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.topology.part import MEMORY, Link, Part


def parts_of(graph: Any) -> list[Part]:
    """Return the parts of a networkx graph. The root is the first network, else the first host."""
    import networkx as nx

    if not isinstance(graph, nx.Graph) or graph.is_directed() or graph.is_multigraph():
        raise TypeError(f"Topology.from_graph: expected an undirected networkx.Graph, got {type(graph).__name__}")
    if not graph:
        raise ValueError("Topology.from_graph: the graph is empty")
    if not nx.is_connected(graph):
        first = next(iter(graph))
        second = next(node for node in graph if not nx.has_path(graph, first, node))
        raise ValueError(
            f"Topology.from_graph: there is no route from {first!r} to {second!r}; link all parts, hosts through a"
            " node of kind 'network'"
        )
    if not nx.is_tree(graph):
        circle = " - ".join(repr(edge[0]) for edge in nx.find_cycle(graph))
        raise ValueError(
            f"Topology.from_graph: {circle} is a cycle, but there must be one route between two ranks; put a node"
            " of kind 'switch' in the middle of GPUs that are all linked with each other"
        )
    root = _root(graph)
    parts = [_part(graph, root, None)]
    parts += [_part(graph, child, parent) for parent, child in nx.bfs_edges(graph, root)]
    return parts


def _root(graph: Any) -> Any:
    for kind in ("network", "host"):
        for node, found in graph.nodes(data="kind"):
            if found == kind:
                return node
    raise ValueError("Topology.from_graph: no node is of kind 'host'; give every node its kind")


def _part(graph: Any, node: Any, parent: Any) -> Part:
    where = f"Topology.from_graph: node {node!r}"
    given = graph.nodes[node]
    if "kind" not in given:
        raise ValueError(f"{where} has no attribute 'kind'; give every node its kind, such as 'host'")
    try:
        memory = Link(given.get("memory_latency_s", MEMORY.latency_s), given.get("memory_bandwidth", MEMORY.bandwidth))
        link = None if parent is None else _link(graph, parent, node)
        return Part(
            str(node),
            given["kind"],
            None if parent is None else str(parent),
            link,
            memory,
            tuple(int(rank) for rank in given.get("ranks", ())),
            int(given.get("cores", 0)),
        )
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where}: {error}") from None


def _link(graph: Any, parent: Any, node: Any) -> Link:
    given = graph.edges[parent, node]
    missing = [name for name in ("latency_s", "bandwidth") if name not in given]
    if missing:
        raise ValueError(
            f"the edge to {parent!r} has no attribute {' and no '.join(map(repr, missing))};"
            " pass seconds and bytes per second"
        )
    return Link(given["latency_s"], given["bandwidth"])


def graph_of(parts: Sequence[Part]) -> Any:
    import networkx as nx

    graph = nx.Graph()
    for part in parts:
        graph.add_node(
            part.name,
            kind=part.kind,
            ranks=part.ranks,
            memory_latency_s=part.memory.latency_s,
            memory_bandwidth=part.memory.bandwidth,
            cores=part.cores,
        )
        if part.link is not None:
            graph.add_edge(part.parent, part.name, latency_s=part.link.latency_s, bandwidth=part.link.bandwidth)
    return graph
