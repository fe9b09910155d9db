"""Estimates of the cost of a collective from the links and from measured curves, and links fitted to such curves."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshdist.topology.algorithms import algorithms_of
from meshdist.topology.curve import Curve
from meshdist.topology.part import Link, Part
from meshdist.topology.topology import Topology

if TYPE_CHECKING:
    from meshdist.mesh.layout.rank_list import Ranks
    from meshdist.topology.contention import Cost


def by_links(topology: Topology, name: str, rows: Ranks) -> dict[str, Cost]:
    """Return the cost of each algorithm of a collective, called by all groups in `rows` at once."""
    found = {algorithm: count(topology.routes, rows) for algorithm, count in algorithms_of(name).items()}
    return {algorithm: cost for algorithm, cost in found.items() if cost is not None}


class Measured(NamedTuple):
    """A measured curve with its scaling factors: pairs of estimates (requested group, measured group)."""

    curve: Curve
    factors: Sequence[tuple[Estimate, Estimate]]

    def seconds(self, nbytes: float) -> float:
        """Return the time, scaled by the ratio that the links predict for each pair."""
        seconds = self.curve.at(nbytes)
        for asked, known in self.factors:
            least = known.by_links(nbytes)
            seconds *= asked.by_links(nbytes) / least if least else 1.0
        return seconds


class Estimate:
    """The cost of one collective, called by several groups at once. `costs`: by algorithm, from the links."""

    def __init__(self, costs: Mapping[str, Cost], measured: Sequence[Measured] = ()) -> None:
        self.costs = costs
        self._measured = measured

    def by_algorithm(self, nbytes: float) -> dict[str, float]:
        found = {name: cost.seconds(nbytes) for name, cost in self.costs.items()}
        return dict(sorted(found.items(), key=operator.itemgetter(1)))

    def by_links(self, nbytes: float) -> float:
        return min(cost.seconds(nbytes) for cost in self.costs.values())

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of the slowest kind of group: from measured curves if any, else from the links."""
        if not self._measured:
            return self.by_links(nbytes)
        return max(measured.seconds(nbytes) for measured in self._measured)


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
