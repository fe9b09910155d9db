"""Estimates of the cost of a collective, from the links and from measured curves."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshdist.topology.algorithms import algorithms_of
from meshdist.topology.curve import Curve
from meshdist.topology.topology import Topology

if TYPE_CHECKING:
    from meshdist.mesh.layout.rank_list import Ranks
    from meshdist.topology.routes import Cost


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
