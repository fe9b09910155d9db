"""Topology: the host of each rank, and the speed of the links between them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshdist.system.plurals import counted
from meshdist.topology.part import GPU_LINK, MEMORY, NETWORK, SOCKET_LINK, Link, Part, checked_parts, checked_ranks

if TYPE_CHECKING:
    from meshdist.mesh.layout.rank_list import Ranks
    from meshdist.topology.contention import Routes


class Topology:
    """The machine that ranks run on: hosts, sockets and GPUs, and the links between them.

    A topology is a tree with one route between any two ranks: the network, its hosts, their sockets, switches and GPUs.
    Each part has a link to its parent, and ranks may be on any part of a host. `Topology.find()` detects it,
    `Topology.uniform` builds it, `Topology.load` reads a TOML file, `Topology.from_graph` converts a networkx graph.

    Args:
        parts: The tree, in any order.

    Raises:
        ValueError: The parts are not a tree, or ranks are not 0, 1, 2, ..., repeated, or on no host.

    Example:
        >>> from meshdist import Topology
        >>> machine = Topology.uniform(2, 4)
        >>> print(machine)
        Topology: 8 ranks on 2 hosts: host0 (4), host1 (4)
        >>> machine.place((2, 4)).tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = checked_parts(parts)
        self._num_ranks = checked_ranks(self._parts)
        self._hosts = _ranks_by_host(self._parts)

    # ---- Constructors

    @classmethod
    def uniform(
        cls,
        num_hosts: int,
        ranks_per_host: int,
        *,
        sockets: int = 0,
        gpus: int = 0,
        memory: Link = MEMORY,
        socket_link: Link = SOCKET_LINK,
        gpu_link: Link = GPU_LINK,
        network: Link = NETWORK,
    ) -> Topology:
        """Return a cluster of equal hosts, with consecutive ranks on each host.

        Args:
            num_hosts: The number of hosts.
            ranks_per_host: The number of ranks on each host.
            sockets: Sockets per host; ranks or GPUs are spread over them in blocks. 0: an undivided host.
            gpus: GPUs per host; ranks are spread over them in blocks. 0: ranks run on processors.
            memory: Between ranks on one socket (or undivided host, or GPU).
            socket_link: From a socket to the middle of its host.
            gpu_link: From a GPU to the middle of its host or socket.
            network: From a host to the network; a message from host to host crosses two of them.

        Raises:
            ValueError: A count below 1, or ranks that cannot be spread evenly over sockets and GPUs.

        Example:
            >>> from meshdist import Topology
            >>> Topology.uniform(2, 8, gpus=8).num_ranks
            16
        """
        from meshdist.topology.part import Links, host_parts, network_part

        for name, count in (("num_hosts", num_hosts), ("ranks_per_host", ranks_per_host)):
            if count < 1:
                raise ValueError(f"Topology.uniform: {name} must be at least 1, got {count}")
        for name, count in (("sockets", sockets), ("gpus", gpus)):
            if count < 0:
                raise ValueError(f"Topology.uniform: {name} must be 0 or positive, got {count}")
        links = Links(memory, socket_link, gpu_link, network)
        parts = network_part(num_hosts)
        for index in range(num_hosts):
            ranks = range(index * ranks_per_host, (index + 1) * ranks_per_host)
            parts += host_parts(f"host{index}", ranks, sockets, gpus, links, linked=num_hosts > 1)
        return cls(parts)

    @classmethod
    def find(cls, *, gpus: bool | None = None) -> Topology:
        """Return the topology of the current world: the ranks of each host, and the parts of this host.

        Every rank stored its host name when it joined, so no messages are sent. Sockets (NUMA nodes) and GPUs are those
        of the calling rank's host; other hosts are assumed to be equal. Links have default speeds unless measured
        (`meshdist.calibrate`) or given.

        Args:
            gpus: Query GPUs and NVLink through CuPy. None: only if CuPy has been imported.

        Raises:
            ValueError: There is no world.
            ImportError: `gpus` is True and CuPy is not installed.

        Example:
            >>> import meshdist
            >>> from meshdist import Topology
            >>> meshdist.run(lambda: Topology.find().num_ranks, 2)
            [2, 2]
        """
        from meshdist.topology.discovery import find_parts

        return cls(find_parts(gpus))

    @classmethod
    def from_graph(cls, graph: Any) -> Topology:
        """Return the topology of a networkx graph; see `meshdist.topology.graphs` for the attributes.

        Args:
            graph: An undirected tree. Nodes have `kind`, and `ranks` if any; edges have `latency_s` and
                `bandwidth` (bytes per second).

        Raises:
            ValueError: The graph has a cycle, is not connected, or lacks attributes.
            TypeError: The argument is not an undirected networkx graph.

        Example:
            >>> import networkx as nx
            >>> from meshdist import Topology
            >>> graph = nx.Graph()
            >>> graph.add_node("a", kind="host", ranks=[0, 2])
            >>> graph.add_node("b", kind="host", ranks=[1, 3])
            >>> graph.add_edge("a", "b", latency_s=1e-5, bandwidth=1e9)
            >>> Topology.from_graph(graph).place((2, 2)).tolist()
            [[0, 2], [1, 3]]
        """
        from meshdist.topology.graphs import parts_of

        return cls(parts_of(graph))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Topology:
        """Return the topology of a TOML file; docs/topology.md describes the format.

        Args:
            path: The file. For a file written by `CostModel.save`, measurements are ignored.

        Raises:
            ValueError: An error in the file; the message names the file and the table.
            OSError: The file cannot be read.
            ImportError: On Python 3.10 without `tomli`.
        """
        from meshdist.topology.toml_file import TomlError, read_topology

        parts = read_topology(path)
        try:
            return cls(parts)
        except (ValueError, TypeError) as error:
            raise TomlError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def of(cls, topology: Topology | str | bool | os.PathLike[str] | Any) -> Topology:
        """Return the Topology for a `topology=` argument.

        Args:
            topology: A Topology, True or "auto" to detect it, the path of a TOML file, or a networkx graph.

        Raises:
            ValueError: A string that is neither "auto" nor the path of a TOML file, or an invalid description.
            TypeError: An argument of a different type.
        """
        if isinstance(topology, Topology):
            return topology
        if topology is True or topology == "auto":
            return cls.find()
        if isinstance(topology, os.PathLike) or (isinstance(topology, str) and topology.endswith(".toml")):
            try:
                return cls.load(topology)
            except FileNotFoundError:
                raise FileNotFoundError(f"topology: there is no file {os.fspath(topology)!r}") from None
        if isinstance(topology, str):
            raise ValueError(f"topology: expected 'auto' or the path of a .toml file, got {topology!r}")
        if hasattr(topology, "nodes") and hasattr(topology, "edges"):
            return cls.from_graph(topology)
        raise TypeError(
            "topology: expected True, 'auto', a Topology, the path of a .toml file or a networkx graph, got"
            f" {topology!r} ({type(topology).__name__})"
        )

    # ---- Attributes

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the tree, parents before children."""
        return self._parts

    @property
    def num_ranks(self) -> int:
        """The number of ranks; they are numbered from 0."""
        return self._num_ranks

    @property
    def hosts(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks of each host that has any, in the order of its parts."""
        return dict(self._hosts)

    @cached_property
    def host_names(self) -> tuple[str, ...]:
        """The name of each rank's host, in rank order."""
        by_rank = {rank: name for name, ranks in self._hosts.items() for rank in ranks}
        return tuple(by_rank[rank] for rank in range(self._num_ranks))

    def host_of(self, rank: int) -> str:
        """Return the name of the host that `rank` runs on.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self._num_ranks:
            raise ValueError(f"topology: there is no rank {rank}, only 0 to {self._num_ranks - 1}")
        return self.host_names[rank]

    @property
    def graph(self) -> Any:
        """A new networkx Graph of the parts and links, with the attributes of `from_graph`."""
        from meshdist.topology.graphs import graph_of

        return graph_of(self._parts)

    @cached_property
    def routes(self) -> Routes:
        """The routes between ranks, as arrays, for the cost model."""
        from meshdist.topology.contention import Routes

        return Routes(self._parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TOML file for `load`.

        Raises:
            OSError: The file cannot be written.
        """
        from meshdist.topology.toml_file import topology_text

        with open(path, "w", encoding="utf-8") as file:
            file.write(topology_text(self._parts))

    # ---- Use

    def place(
        self,
        shape: Sequence[int],
        names: Sequence[str] | None = None,
        inside: str | int | Sequence[str | int] | None = None,
        among: Sequence[int] | None = None,
    ) -> Ranks:
        """Return the ranks of a mesh of this shape, placed so that axes stay inside hosts.

        Deterministic: all ranks get the same result.

        Args:
            shape: The number of ranks along each axis; the product is at most the number of ranks.
            names: The names of the axes.
            inside: Names or indices of axes whose rows must stay inside a host. None: as many of the last axes as
                fit; if hosts have too few or unequal numbers of ranks, as few rows as possible span hosts.
            among: The ranks of the mesh. None: all ranks.

        Returns:
            An int64 array of global ranks of shape `shape`.

        Raises:
            ValueError: The mesh is larger than the world, names are invalid, or the axes of `inside` do not fit.

        Example:
            >>> from meshdist import Topology
            >>> from meshdist.topology import Part, Link
            >>> link = Link(1e-5, 1e9)
            >>> in_turns = Topology([  # ranks alternate between two hosts
            ...     Part("network", "network"),
            ...     Part("a", "host", "network", link, ranks=(0, 2, 4, 6)),
            ...     Part("b", "host", "network", link, ranks=(1, 3, 5, 7)),
            ... ])
            >>> in_turns.place((2, 4)).tolist()
            [[0, 2, 4, 6], [1, 3, 5, 7]]
            >>> in_turns.place((4, 2), ("tp", "dp"), inside="tp").tolist()
            [[0, 1], [2, 3], [4, 5], [6, 7]]
        """
        from meshdist.topology.placement import place_ranks

        hosts = self._hosts
        if among is not None:
            wanted = set(among)
            hosts = {host: tuple(rank for rank in ranks if rank in wanted) for host, ranks in hosts.items()}
        return place_ranks(hosts, shape, names, inside)

    def inside(self, *axes: str | int) -> Placement:
        """Return this topology with axes that must stay inside hosts, for `init_device_mesh`.

        Args:
            axes: Names or indices of axes of the new mesh.

        Example:
            >>> from meshdist import Topology
            >>> Topology.uniform(2, 4).inside("tp").place((4, 2), ("tp", "dp")).tolist()
            [[0, 4], [1, 5], [2, 6], [3, 7]]
        """
        return Placement(self, axes)

    def draw(self, ax: Any = None) -> Any:
        """Draw the tree with networkx and matplotlib: ranks on their parts; faster links are wider.

        A legend lists the speeds of links. More than four equal hosts are drawn as one, with the names of the first
        and the last.

        Args:
            ax: The matplotlib axes to draw on. None: a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from meshdist.topology.drawing import draw_parts

        return draw_parts(self._parts, ax)

    def __eq__(self, other: object) -> bool:
        return self._parts == other._parts if isinstance(other, Topology) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        most = 4
        shown = ", ".join(f"{name} ({len(ranks)})" for name, ranks in list(self._hosts.items())[:most])
        more = f" and {len(self._hosts) - most} more" if len(self._hosts) > most else ""
        num_ranks, num_hosts = counted(self._num_ranks, "rank"), counted(len(self._hosts), "host")
        return f"Topology: {num_ranks} on {num_hosts}: {shown}{more}"


def _ranks_by_host(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    host_above: dict[str, str | None] = {}
    found: dict[str, list[int]] = {}
    for part in parts:
        above = None if part.parent is None else host_above[part.parent]
        # A host linked to a host is a separate host: two machines with a cable between them.
        host = part.name if part.kind == "host" else above
        host_above[part.name] = None if part.kind == "network" else host
        if part.ranks:
            if part.kind == "network" or host is None:
                raise ValueError(
                    f"topology: ranks {list(part.ranks)} are on {part.name!r}, of kind {part.kind!r}, which is in no"
                    " host; put them on a host, or on a socket or GPU below one"
                )
            found.setdefault(host, []).extend(sorted(part.ranks))
    return {host: tuple(ranks) for host, ranks in found.items()}


class Placement:
    """A topology and the axes that must stay inside its hosts, for `init_device_mesh`; see `Topology.inside`.

    Args:
        topology: The machine.
        axes: Names or indices of axes of the new mesh; empty: as many of the last axes as fit.

    Example:
        >>> from meshdist.topology import Topology
        >>> Topology.uniform(2, 2).inside("tp")
        Placement(<Topology: 4 ranks on 2 hosts: host0 (2), host1 (2)>, inside=('tp',))
    """

    def __init__(self, topology: Topology, axes: Sequence[str | int] = ()) -> None:
        self.topology = topology
        self.axes = tuple(axes)

    def place(self, shape: Sequence[int], names: Sequence[str] | None, among: Sequence[int] | None = None) -> Ranks:
        """Return the ranks of a mesh of this shape; see `Topology.place`."""
        return self.topology.place(shape, names, self.axes or None, among)

    def __repr__(self) -> str:
        return f"Placement({self.topology!r}, inside={self.axes})"


def placement_of(topology: Any, world_size: int) -> Placement:
    placement = topology if isinstance(topology, Placement) else Placement(Topology.of(topology))
    if placement.topology.num_ranks != world_size:
        raise ValueError(
            f"topology: it has {counted(placement.topology.num_ranks, 'rank')}, but the world has {world_size};"
            " describe where all ranks of the world run"
        )
    return placement
