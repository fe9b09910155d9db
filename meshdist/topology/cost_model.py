"""CostModel: how long a collective takes on a group or along a mesh axis."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.mesh.layout import Layout
from meshdist.topology.algorithms import collective_name
from meshdist.topology.curves import Curve, nearest
from meshdist.topology.estimate import Estimate, Measured, by_links
from meshdist.topology.link import MEMORY, NETWORK
from meshdist.topology.part import Part
from meshdist.topology.topology import Topology

if TYPE_CHECKING:
    from meshdist.mesh.rank_list import Ranks


class CostModel:
    """Predict how long collectives take on a topology.

    By itself it counts on the links: every algorithm's rounds, each with the latency of its longest way and the bytes
    on its fullest link (alpha-beta; see `meshdist.topology.algorithms`), and takes the fastest. With measured curves
    (`meshdist.calibrate`), groups of a measured kind are read off them, and others scaled from the most similar one by
    the links; groups over numbers of hosts of which nothing was measured are up to the links alone.

    Args:
        topology: The machine, or anything that `Topology.of` takes.
        curves: What was measured there.

    Example:
        >>> cost = CostModel(Topology.uniform(num_hosts=4, ranks_per_host=8))
        >>> cost.predict("all_reduce", 1 << 20, range(8)) < cost.predict("all_reduce", 1 << 20, 32)
        True
        >>> sorted(cost.algorithms("all_reduce", 1 << 20, 32))
        ['doubling', 'hierarchical', 'hierarchical tree', 'ring', 'tree']
    """

    def __init__(self, topology: Topology | Any, curves: Sequence[Curve] = ()) -> None:
        self.topology = Topology.of(topology)
        self.curves = tuple(curves)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Return the model that `save` wrote; of a plain topology file, one without measurements.

        Raises:
            ValueError: What the file says is wrong; the message names the file and the table.
            OSError: It cannot be read.
        """
        from meshdist.topology.toml_file import read_curves

        return cls(Topology.load(path), read_curves(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write topology and curves to a TOML file.

        Raises:
            OSError: It cannot be written.
        """
        from meshdist.topology.toml_file import curves_text, topology_text

        with open(path, "w", encoding="utf-8") as file:
            file.write(topology_text(self.topology.parts) + curves_text(self.curves))

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
            group: A ProcessGroup, a DeviceMesh, global ranks in any arrangement, or how many: the first ones.
            axis: Name or index of an axis of the mesh (or of the array of ranks): all its groups call at once and
                share the links. None: all ranks are one group.
            algorithm: Count with this one, by the links alone. None: as described at the class.

        Raises:
            ValueError: An unknown collective or algorithm, negative bytes, or ranks that the topology does not have.
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).

        Example:
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
            collective: As in `predict`.
            nbytes: As in `predict`.
            group: As in `predict`.
            axis: As in `predict`.

        Raises:
            ValueError: As in `predict`.

        Example:
            >>> cost = CostModel(Topology.uniform(1, 8))
            >>> list(cost.algorithms("all_reduce", 8, 8))
            ['doubling', 'tree', 'ring']
        """
        return self.estimate(collective, self._rows(group, axis)).by_algorithm(nbytes)

    def estimate(self, collective: str, rows: Ranks) -> Estimate:
        """Return what `collective` costs on the groups that are the rows of an array, all at once.

        Args:
            collective: As in `predict`.
            rows: Global ranks of the topology, an int64 array of shape (groups, ranks of each).

        Raises:
            ValueError: An unknown collective.
        """
        name = collective_name(collective)
        costs = by_links(self.topology, name, rows)
        return Estimate(costs, self._measured(name, rows, Estimate(costs)))

    def _measured(self, name: str, rows: Ranks, here: Estimate) -> list[Measured]:
        """Return a measured curve for every kind of group among `rows`; nothing unless there is one for each."""
        if rows.shape[1] == 1 or not any(curve.collective == name for curve in self.curves):
            return []
        found = []
        for members, number in self._kinds(rows).items():
            curve = nearest(self.curves, name, members)
            if curve is None:
                return []
            factors = []
            if len(rows) > 1:  # measured was one group alone
                factors.append((here, Estimate(by_links(self.topology, name, rows[number : number + 1]))))
            if curve.members != members:
                factors.append((self._alike(name, members), self._alike(name, curve.members)))
            found.append(Measured(curve, factors))
        return found

    def _kinds(self, rows: Ranks) -> dict[tuple[int, ...], int]:
        """Return the kinds of groups: how many members on each host, the most first; with one row of each."""
        kinds: dict[tuple[int, ...], int] = {}
        for number, hosts in enumerate(self.topology.routes.host[rows].tolist()):
            kinds.setdefault(tuple(sorted(Counter(hosts).values(), reverse=True)), number)
        return kinds

    def _alike(self, name: str, members: tuple[int, ...]) -> Estimate:
        """Return what a group with so many members on its hosts costs on hosts with the links of the first one."""
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
        """Return the groups that `group` and `axis` mean, as the rows of an array."""
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
                " give the model a topology of the whole world"
            )
        if axis is None:
            return layout.ranks.reshape(1, -1)
        return axis_rows(layout.ranks, layout.axis(axis))

    def __repr__(self) -> str:
        return f"<CostModel: {self.topology}; {len(self.curves)} measured curves>"


def axis_rows(ranks: Ranks, axis: int) -> Ranks:
    """Return the groups along an axis of an array of ranks, as rows."""
    return np.ascontiguousarray(np.moveaxis(ranks, axis, -1)).reshape(-1, ranks.shape[axis])
