"""Links fitted to measured curves: the latency and the bandwidth of the memory and of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshdist.topology.curve import Curve
from meshdist.topology.estimate import by_links
from meshdist.topology.part import Link, Part
from meshdist.topology.topology import Topology


def fitted(parts: Sequence[Part], curves: Sequence[Curve]) -> list[Part]:
    """Return `parts` with the links that fit the curves best; other links stay unchanged.

    Groups on one host determine the memory between its ranks; groups of one rank per host determine the network.
    """
    memory = fit_link([curve for curve in curves if len(curve.members) == 1], _in_memory)
    network = fit_link([curve for curve in curves if len(curve.members) > 1 and max(curve.members) == 1], _in_network)
    found = []
    for part in parts:
        if memory is not None and part.kind != "network":
            part = replace(part, memory=memory)
        if network is not None and part.kind == "host" and part.link is not None:
            part = replace(part, link=network)
        found.append(part)
    return found


def _in_memory(num_ranks: int, link: Link) -> Topology:
    return Topology.uniform(1, num_ranks, memory=link)


def _in_network(num_ranks: int, link: Link) -> Topology:
    return Topology.uniform(num_ranks, 1, network=link)


def fit_link(curves: Sequence[Curve], machine: Callable[[int, Link], Topology]) -> Link | None:
    """Return the link for which the model is nearest to the curves in ratio; None without curves.

    All groups of `curves` use links of this one kind; `machine` makes a topology of so many ranks with a link.
    """
    rows = []
    for curve in curves:
        group = np.arange(sum(curve.members)).reshape(1, -1)
        # The best algorithm if only latency counts, and the best one if only bandwidth counts.
        waits = by_links(machine(group.size, Link(1.0, math.inf)), curve.collective, group).values()
        moves = by_links(machine(group.size, Link(0.0, 1.0)), curve.collective, group).values()
        latencies = min(cost.latency_s for cost in waits)
        bytes_moved = min(cost.s_per_byte for cost in moves)
        rows += [
            (latencies / time, bytes_moved * nbytes / time)
            for nbytes, time in zip(curve.nbytes, curve.seconds, strict=True)
        ]
    if not rows:
        return None
    factors = np.array(rows)
    latency_s, s_per_byte = np.linalg.lstsq(factors, np.ones(len(rows)), rcond=None)[0].tolist()
    # Neither can be negative: if the best fit has a negative one, fit the other alone.
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, _alone(factors[:, 1])
    elif s_per_byte <= 0:
        latency_s, s_per_byte = _alone(factors[:, 0]), 0.0
    return Link(latency_s, 1 / s_per_byte if s_per_byte else math.inf)


def _alone(factor: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(factor.sum() / (factor @ factor))
