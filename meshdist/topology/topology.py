"""Topology: which rank runs where, and how fast the ways between them are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshdist.topology.link import GPU_LINK, MEMORY, NETWORK, SOCKET_LINK, Link
from meshdist.topology.part import Part, checked_parts, checked_ranks

if TYPE_CHECKING:
    from meshdist.mesh.rank_list import Ranks
    from meshdist.topology.placement import Placement
    from meshdist.topology.routes import Routes


class Topology:
    """Describe the machine that ranks run on: hosts, sockets and GPUs, and the links between them.

    A topology is a tree, so that there is one way between any two ranks: the network, its hosts, their sockets,
    switches and GPUs. Each part has a link to the one above it, and ranks may sit on any of them. It is found
    (`Topology.find()`), built (`Topology.uniform`), read from a TOML file (`Topology.load`) or made of a networkx graph
    (`Topology.from_graph`).

    Args:
        parts: The tree, in any order.

    Raises:
        ValueError: No tree, ranks that are not 0, 1, 2, ..., one of them twice, or on no host.

    Example:
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

    # ---- Where they come from

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
        """Return a cluster of equal hosts, their ranks numbered on from host to host.

        Args:
            num_hosts: How many hosts.
            ranks_per_host: How many ranks on each.
            sockets: Sockets of a host, over which the ranks or GPUs are spread in blocks; 0: the host is not divided.
            gpus: GPUs of a host, over which the ranks are spread in blocks; 0: ranks on processors.
            memory: Between ranks of one socket (or host, where it is not divided; or GPU).
            socket_link: From a socket to the middle of its host.
            gpu_link: From a GPU to the middle of its host or socket.
            network: From a host to the network; a message from host to host crosses two of them.

        Raises:
            ValueError: A count below 1, or sockets and GPUs that ranks cannot be spread over evenly.

        Example:
            >>> Topology.uniform(2, 8, gpus=8).num_ranks
            16
        """
        from meshdist.topology.hosts import Links, host_parts, network_part

        for name, count in (("num_hosts", num_hosts), ("ranks_per_host", ranks_per_host)):
            if count < 1:
                raise ValueError(f"Topology.uniform: {name} must be at least 1, got {count}")
        links = Links(memory, socket_link, gpu_link, network)
        parts = network_part(num_hosts)
        for index in range(num_hosts):
            ranks = range(index * ranks_per_host, (index + 1) * ranks_per_host)
            parts += host_parts(f"host{index}", ranks, sockets, gpus, links, linked=num_hosts > 1)
        return cls(parts)

    @classmethod
    def find(cls, *, gpus: bool | None = None) -> Topology:
        """Return the topology of the current world: which ranks share a host, and what this host is made of.

        Hosts are known from what every rank left in the store when it joined; nothing more is sent. Sockets (NUMA
        nodes) and GPUs are those of the calling rank's host, and the other hosts are taken to be alike where they have
        ranks for them. Links are the defaults until they are measured (`meshdist.calibrate`) or given.

        Args:
            gpus: Ask CuPy for GPUs and NVLink. None: if it has been imported.

        Raises:
            ValueError: There is no world.
            ImportError: `gpus` is True and CuPy is not installed.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: Topology.find().num_ranks, 2)
            [2, 2]
        """
        from meshdist.topology.discovery import find_parts

        return cls(find_parts(gpus))

    @classmethod
    def from_graph(cls, graph: Any) -> Topology:
        """Return the topology that a networkx graph describes; see `meshdist.topology.graphs` for its attributes.

        Args:
            graph: An undirected tree. Nodes have `kind`, and `ranks` where ranks run; edges have `latency_s` and
                `bandwidth` (bytes per second).

        Raises:
            ValueError: The graph has a circle, is not connected, or misses attributes; the message names the place.
            TypeError: It is no undirected networkx graph.

        Example:
            >>> import networkx as nx
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
        """Return the topology of a TOML file, as docs/topology.md describes it.

        Args:
            path: The file. One that `CostModel.save` wrote will do: what was measured is passed over.

        Raises:
            ValueError: What the file says is wrong; the message names the file and the table.
            OSError: It cannot be read.
            ImportError: On Python 3.10 without `tomli`.
        """
        from meshdist.topology.toml_file import read_topology

        return cls(read_topology(path))

    @classmethod
    def of(cls, topology: Topology | str | bool | os.PathLike[str] | Any) -> Topology:
        """Return what a `topology=` argument means.

        Args:
            topology: A Topology, True or "auto" to find it, the path of a TOML file, or a networkx graph.

        Raises:
            ValueError: It is a string that is neither "auto" nor the path of a TOML file, or what it names is wrong.
            TypeError: It is none of these.
        """
        if isinstance(topology, Topology):
            return topology
        if topology is True or topology == "auto":
            return cls.find()
        if isinstance(topology, os.PathLike) or (isinstance(topology, str) and topology.endswith(".toml")):
            return cls.load(topology)
        if isinstance(topology, str):
            raise ValueError(f"topology: expected 'auto' or the path of a .toml file, got {topology!r}")
        if hasattr(topology, "nodes") and hasattr(topology, "edges"):
            return cls.from_graph(topology)
        raise TypeError(
            "topology: expected True, 'auto', a Topology, the path of a .toml file or a networkx graph, got"
            f" {topology!r} ({type(topology).__name__})"
        )

    # ---- What it says

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
        """The hosts that have ranks, and the ranks of each in the order of its parts."""
        return dict(self._hosts)

    def host_of(self, rank: int) -> str:
        """Return the name of the host that `rank` runs on.

        Raises:
            ValueError: There is no such rank.
        """
        for name, ranks in self._hosts.items():
            if rank in ranks:
                return name
        raise ValueError(f"topology: there is no rank {rank}, only 0 to {self._num_ranks - 1}")

    @property
    def graph(self) -> Any:
        """A networkx Graph of the parts and links, with the attributes that `from_graph` takes; a new one each time."""
        from meshdist.topology.graphs import graph_of

        return graph_of(self._parts)

    @cached_property
    def routes(self) -> Routes:
        """The ways between the ranks, as arrays, on which the cost model counts."""
        from meshdist.topology.routes import Routes

        return Routes(self._parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TOML file that `load` reads.

        Raises:
            OSError: It cannot be written.
        """
        from meshdist.topology.toml_file import topology_text

        with open(path, "w", encoding="utf-8") as file:
            file.write(topology_text(self._parts))

    # ---- What it is for

    def place(
        self,
        shape: Sequence[int],
        names: Sequence[str] | None = None,
        inside: str | Sequence[str] | None = None,
        among: Sequence[int] | None = None,
    ) -> Ranks:
        """Return the ranks of a mesh of this shape, arranged so that axes stay inside hosts.

        A function of its arguments alone, so that all ranks get the same.

        Args:
            shape: The number of ranks along each axis; the product is at most the number of ranks.
            names: The names of the axes.
            inside: Names of axes whose rows must not leave a host, a ValueError if they cannot. None: the last axes, as
                many of them as fit; where hosts have too few or unequal numbers of ranks, as few rows as possible
                leave one.
            among: The ranks that the mesh is made of; all where None.

        Returns:
            An int64 array of global ranks of shape `shape`.

        Raises:
            ValueError: The mesh is larger than the world, names are wrong, or the axes of `inside` do not fit.

        Example:
            >>> from meshdist.topology import Part, Link
            >>> link = Link(1e-5, 1e9)
            >>> in_turns = Topology([  # ranks that came in turns over two hosts
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

    def inside(self, *axes: str) -> Placement:
        """Return this topology with the names of axes that must stay inside hosts, for `init_device_mesh`.

        Args:
            axes: Names of axes of the mesh to come.

        Example:
            >>> Topology.uniform(2, 4).inside("tp").place((4, 2), ("tp", "dp")).tolist()
            [[0, 4], [1, 5], [2, 6], [3, 7]]
        """
        from meshdist.topology.placement import Placement

        return Placement(self, axes)

    def draw(self, ax: Any = None) -> Any:
        """Draw the tree with networkx and matplotlib: the ranks on their parts, links the wider the faster.

        Of equal links to one part, the first says how fast they are.

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
        plural = "s" if len(self._hosts) > 1 else ""
        return f"Topology: {self._num_ranks} ranks on {len(self._hosts)} host{plural}: {shown}{more}"


def _ranks_by_host(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each host: hosts in the order of the tree, ranks in that of the parts of the host."""
    host_above: dict[str, str | None] = {}
    found: dict[str, list[int]] = {}
    for part in parts:
        above = None if part.parent is None else host_above[part.parent]
        # A host linked to a host is one of its own: two machines with a cable between them.
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
