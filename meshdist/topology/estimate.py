"""Estimates: what one collective costs on some groups, for any number of bytes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshdist.topology.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from meshdist.mesh.rank_list import Ranks
    from meshdist.topology.curves import Curve
    from meshdist.topology.routes import Cost
    from meshdist.topology.topology import Topology


def by_links(topology: Topology, name: str, rows: Ranks) -> dict[str, Cost]:
    """Return what each algorithm of a collective costs that the groups in `rows` call at once."""
    found = {algorithm: count(topology.routes, rows) for algorithm, count in ALGORITHMS[name].items()}
    return {algorithm: cost for algorithm, cost in found.items() if cost is not None}


class Measured(NamedTuple):
    """A measured curve, and what to scale it by: pairs of estimates, of what is asked for and of what was measured."""

    curve: Curve
    factors: Sequence[tuple[Estimate, Estimate]]

    def seconds(self, nbytes: float) -> float:
        """Return the time, scaled by the ratio that the links predict of each pair."""
        seconds = self.curve.at(nbytes)
        for asked, known in self.factors:
            least = known.by_links(nbytes)
            seconds *= asked.by_links(nbytes) / least if least else 1.0
        return seconds


class Estimate:
    """Know what one collective costs on some groups that call it at once, for any number of bytes.

    Attributes:
        costs: By algorithm, what the links say.
    """

    def __init__(self, costs: Mapping[str, Cost], measured: Sequence[Measured] = ()) -> None:
        self.costs = costs
        self._measured = measured

    def by_algorithm(self, nbytes: float) -> dict[str, float]:
        """Return the seconds of each algorithm by the links, the fastest first."""
        found = {name: cost.seconds(nbytes) for name, cost in self.costs.items()}
        return dict(sorted(found.items(), key=operator.itemgetter(1)))

    def by_links(self, nbytes: float) -> float:
        """Return the seconds of the fastest algorithm by the links."""
        return min(cost.seconds(nbytes) for cost in self.costs.values())

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of the slowest kind of group: by measured curves if there are any, else by the links."""
        if not self._measured:
            return self.by_links(nbytes)
        return max(measured.seconds(nbytes) for measured in self._measured)
