"""CostModel: predict the time of a collective on a group or along a mesh axis."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.mesh.layout.layout import Layout
from meshdist.topology.algorithms import collective_name
from meshdist.topology.curve import Curve, nearest
from meshdist.topology.estimate import Estimate, Measured, by_links, fitted
from meshdist.topology.part import MEMORY, NETWORK, Part, parts_of_hosts
from meshdist.topology.topology import Topology

if TYPE_CHECKING:
    from meshdist.mesh.layout.rank_list import Ranks


# The default if only the number of ranks is known.
RANKS_OF_A_HOST = 8


class CostModel:
    """Predict the times of collectives on a topology.

    Without measurements, it computes times from the links (alpha-beta model; see `meshdist.topology.algorithms`): for
    each algorithm the sum over its rounds of the latency of the longest route and the time of the bytes on the busiest
    link; the fastest algorithm counts. With measured curves (`meshdist.calibrate`), it reads the times of groups of a
    measured kind off the curves, and for other groups scales the most similar curve by the links. For numbers of hosts
    without measurements, it uses the links alone.

    Args:
        topology: The machine, or anything that `Topology.of` accepts; or a number of ranks on hosts of 8 (the last one
            may have fewer) with default links.
        curves: The measurements on this machine.
        note: A remark about the measurements.

    Example:
        >>> from meshdist import CostModel, Topology
        >>> cost = CostModel(Topology.uniform(num_hosts=4, ranks_per_host=8))
        >>> cost.predict("all_reduce", 1 << 20, range(8)) < cost.predict("all_reduce", 1 << 20, 32)
        True
        >>> sorted(cost.algorithms("all_reduce", 1 << 20, 32))
        ['doubling', 'hierarchical', 'hierarchical tree', 'ring', 'tree']
    """

    def __init__(self, topology: Topology | Any, curves: Sequence[Curve] = (), note: str = "") -> None:
        self.topology = _machine(topology)
        self.curves = tuple(curves)
        self.note = note

    def on(self, topology: Topology | Any) -> CostModel:
        """Return a model of another machine that consists of hosts like the measured ones.

        It has the same curves. Links that the curves determine (the memory between ranks of a host, the network)
        replace those of the topology.

        Args:
            topology: The other machine: a Topology, or what `Topology` accepts.

        Example:
            >>> from meshdist import CostModel, Topology
            >>> from meshdist.topology import Curve
            >>> curve = Curve("all_reduce", (2,), (1 << 10, 1 << 20), (1e-5, 1e-3))
            >>> larger = CostModel(Topology.uniform(1, 2), [curve]).on(Topology.uniform(1024, 8))
            >>> larger.predict("all_reduce", 1 << 20, [8, 9]), larger.topology.num_ranks
            (0.001, 8192)
        """
        return CostModel(Topology(fitted(_machine(topology).parts, self.curves)), self.curves, self.note)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Return the model written by `save`; for a plain topology file, a model without measurements.

        Raises:
            ValueError: An error in the file; the message names the file and the table.
            OSError: The file cannot be read.
        """
        from meshdist.topology.toml_file import read_curves

        return cls(Topology.load(path), *read_curves(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write topology and curves to a TOML file.

        Raises:
            OSError: The file cannot be written.
        """
        from meshdist.topology.toml_file import curves_text, topology_text

        with open(path, "w", encoding="utf-8") as file:
            file.write(topology_text(self.topology.parts) + curves_text(self.curves, self.note))

    def predict(
        self,
        collective: str,
        nbytes: float,
        group: Any,
        axis: int | str | None = None,
        *,
        algorithm: str | None = None,
    ) -> float:
        """Return how many seconds one call takes.

        Args:
            collective: Its name, such as "all_reduce", "all_gather_into_tensor", "all_to_all_single" or "send" (each
                rank to the next one of the group, as the stages of a pipeline do).
            nbytes: The bytes of the call's larger side on one rank: of the array that all_reduce, broadcast and reduce
                work on, that all_gather fills, that reduce_scatter and all_to_all read, that the root of gather and
                scatter holds.
            group: A ProcessGroup, a DeviceMesh, global ranks in any arrangement, or a number n for the first n ranks.
            axis: Name or index of an axis of the mesh (or of the array of ranks): all its groups call at once and
                share the links. None: all ranks are one group.
            algorithm: Use this algorithm and the links alone. None: as described for the class.

        Raises:
            ValueError: An unknown collective or algorithm, negative bytes, or ranks outside the topology.
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.

        Example:
            >>> from meshdist import CostModel, Topology
            >>> cost = CostModel(Topology.uniform(2, 4))
            >>> ranks = [[0, 1, 2, 3], [4, 5, 6, 7]]
            >>> alone = cost.predict("all_reduce", 1 << 20, [0, 4])
            >>> cost.predict("all_reduce", 1 << 20, ranks, axis=0) > 2 * alone  # four pairs share the network
            True
        """
        estimate = self.estimate(collective, self._rows(group, axis))
        if not nbytes >= 0:
            raise ValueError(f"CostModel.predict: nbytes must be 0 or positive, got {nbytes!r}")
        if algorithm is None:
            return estimate.seconds(nbytes)
        if algorithm not in estimate.costs:
            raise ValueError(
                f"CostModel.predict: no algorithm {algorithm!r} for {collective} on this group; there are"
                f" {', '.join(map(repr, estimate.costs))}"
            )
        return estimate.costs[algorithm].seconds(nbytes)

    def algorithms(self, collective: str, nbytes: float, group: Any, axis: int | str | None = None) -> dict[str, float]:
        """Return the seconds that each algorithm takes by the links alone, the fastest first.

        Args:
            collective: The name of the collective, as in `predict`.
            nbytes: The size of the call in bytes, as in `predict`.
            group: The ranks, as in `predict`.
            axis: The axis of a mesh along which all groups call at once, as in `predict`.

        Raises:
            ValueError: `predict` raises it for these arguments.

        Example:
            >>> from meshdist import CostModel, Topology
            >>> cost = CostModel(Topology.uniform(1, 8))
            >>> list(cost.algorithms("all_reduce", 8, 8))
            ['doubling', 'tree', 'ring']
        """
        return self.estimate(collective, self._rows(group, axis)).by_algorithm(nbytes)

    def estimate(self, collective: str, rows: Ranks) -> Estimate:
        """Return what `collective` costs on the groups that are the rows of an array, all at once.

        Args:
            collective: The name of the collective, as in `predict`.
            rows: Global ranks of the topology, an int64 array of shape (groups, ranks of each).

        Raises:
            ValueError: An unknown collective.
        """
        name = collective_name(collective)
        costs = by_links(self.topology, name, rows)
        return Estimate(costs, self._measured(name, rows, Estimate(costs)))

    def _measured(self, name: str, rows: Ranks, here: Estimate) -> list[Measured]:
        """Return a measured curve for every kind of group in `rows`; an empty list if one lacks a curve."""
        if rows.shape[1] == 1 or not any(curve.collective == name for curve in self.curves):
            return []
        found = []
        for members, number in self._kinds(rows).items():
            curve = nearest(self.curves, name, members)
            if curve is None:
                return []
            factors = []
            if len(rows) > 1:  # the curve is of one group alone
                factors.append((here, Estimate(by_links(self.topology, name, rows[number : number + 1]))))
            if curve.members != members:
                factors.append((self._alike(name, members), self._alike(name, curve.members)))
            found.append(Measured(curve, factors))
        return found

    def _kinds(self, rows: Ranks) -> dict[tuple[int, ...], int]:
        """Return the kinds of groups (members per host, descending), each with the index of one row."""
        kinds: dict[tuple[int, ...], int] = {}
        for number, hosts in enumerate(self.topology.routes.host[rows].tolist()):
            kinds.setdefault(tuple(sorted(Counter(hosts).values(), reverse=True)), number)
        return kinds

    def _alike(self, name: str, members: tuple[int, ...]) -> Estimate:
        """Return the cost for a group with these members per host, on hosts with the links of the first host."""
        host = next(part for part in self.topology.parts if part.kind == "host")
        memory = next((part.memory for part in self.topology.parts if part.ranks), MEMORY)
        parts = [Part("network", "network")]
        first = 0
        for number, count in enumerate(members):
            ranks = tuple(range(first, first + count))
            first += count
            parts.append(Part(f"host{number}", "host", "network", host.link or NETWORK, memory, ranks))
        return Estimate(by_links(Topology(parts), name, np.arange(first).reshape(1, -1)))

    def _rows(self, group: Any, axis: int | str | None) -> Ranks:
        names = None
        if hasattr(group, "mesh"):
            group, names = group.mesh, group.mesh_dim_names
        elif hasattr(group, "ranks"):
            group = group.ranks
        elif isinstance(group, (int, np.integer)) and not isinstance(group, bool):
            if group < 1:
                raise ValueError(f"CostModel: a group has at least 1 rank, got {group}")
            group = range(int(group))
        layout = Layout(group if isinstance(group, np.ndarray) else list(group), names)
        highest = int(layout.ranks.max())
        if highest >= self.topology.num_ranks:
            raise ValueError(
                f"CostModel: rank {highest} is not in the topology, which has ranks 0 to {self.topology.num_ranks - 1};"
                " give the model a topology of the whole world, or take cost.on(topology)"
            )
        if axis is None:
            return layout.ranks.reshape(1, -1)
        return axis_rows(layout.ranks, layout.axis(axis))

    def __repr__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return f"<CostModel: {self.topology}; {len(self.curves)} measured curves{note}>"


def _machine(given: Topology | Any) -> Topology:
    if isinstance(given, bool) or not isinstance(given, int):
        return Topology.of(given)
    if given < 1:
        raise ValueError(f"cost model: the number of ranks must be at least 1, got {given}")
    return Topology(parts_of_hosts(given, RANKS_OF_A_HOST))


def axis_rows(ranks: Ranks, axis: int) -> Ranks:
    return np.ascontiguousarray(np.moveaxis(ranks, axis, -1)).reshape(-1, ranks.shape[axis])
