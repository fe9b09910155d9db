"""MeshState: the fields of a mesh, and the mesh as a value: equality, pickling, printing, and the current mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from meshdist.collectives.methods import CollectiveMethods
from meshdist.errors import DistError
from meshdist.groups.world import current_world
from meshdist.mesh.layout.layout import Layout
from meshdist.mesh.layout.strides import Axis
from meshdist.runtime.rank_text import ranks_text
from meshdist.system.name_hints import explaining
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from typing_extensions import Self

    from meshdist.groups.process_group import ProcessGroup
    from meshdist.groups.world import World
    from meshdist.mesh.layout.rank_list import Ranks
    from meshdist.mesh.mesh_check import Agreement
    from meshdist.topology.topology import Topology

# The key of a mesh in its family: axes in the root's list of ranks, names, backends.
Key: TypeAlias = "tuple[tuple[Axis, ...], tuple[str, ...] | None, tuple[str | None, ...]]"


class MeshState(CollectiveMethods):
    """The state of a mesh. A root is made from ranks; meshes derived from it share the root's family."""

    _layout: Layout
    _device_type: str
    _backends: tuple[str | None, ...]  # one per axis, None for the world's
    _root: Self
    _world: World | None
    _coordinate: tuple[int, ...] | None
    _plane_known: bool
    _slices: dict[str | tuple[str, ...], Self]  # by the index expression
    _axis_groups: dict[int, ProcessGroup]
    _known_exchanges: dict[tuple[Any, ...], Any]  # by the arguments of `shift` and `halo_exchange`
    _flat_group: ProcessGroup | None
    _others: dict[tuple[object, ...], list[Self]]  # meshes of other families derived from this one

    # Set on roots only; the family shares them.
    _family: dict[Key, Self]
    _flattened: dict[str, tuple[Axis, str | None]]  # flattened axes by name, with their backends
    _groups: dict[tuple[Axis, str | None], ProcessGroup]  # by axis and backend
    _universe: ProcessGroup | None  # the group that contains the mesh; None for the world
    _agreement: Agreement | None
    _topology: Topology | None  # the source of host names; the world if None

    def _store(self, device_type: str, layout: Layout, backends: tuple[str | None, ...], root: Self) -> None:
        """Set the fields of a mesh that is not bound to a world yet."""
        self._device_type = device_type
        self._layout = layout
        self._backends = backends
        self._root = root
        self._world = None
        self._coordinate = None
        self._plane_known = True
        self._slices = {}
        self._axis_groups = {}
        self._known_exchanges = {}
        self._flat_group = None
        self._others = {}
        if root is self:
            self._family = {(layout.axes, layout.names, backends): self}
            self._flattened = {}
            self._groups = {}
            self._universe = None
            self._agreement = None
            self._topology = None

    def _bind(self, world: World) -> World:
        highest = int(self._layout.ranks.max())
        if highest >= world.size:
            raise ValueError(
                f"DeviceMesh {self._layout.describe()}: the mesh has rank {highest}, but the world has only"
                f" {counted(world.size, 'rank')}; start more ranks or create a smaller mesh"
            )
        self._coordinate = self._layout.coordinate(world.rank)
        self._world = world
        return world

    def _here(self) -> World:
        """Return the world of this mesh; an unpickled mesh binds to the current world."""
        return self._bind(current_world()) if self._world is None else self._world

    def _hosts(self) -> MeshHosts | None:
        return None if self._world is None else MeshHosts(self._world, self._root._topology)

    # ---- Attributes

    @property
    def mesh(self) -> Ranks:
        """The global ranks of this mesh, a read-only integer array of its shape.

        Raises:
            ValueError: This is a slice, and the calling rank is outside the mesh.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.init_device_mesh("cpu", (1, 2)).mesh.tolist(), 2)
            [[[0, 1]], [[0, 1]]]
        """
        if not self._plane_known:
            raise ValueError(self._outside("DeviceMesh.mesh", "a slice exists only on ranks of the mesh"))
        return self._layout.ranks

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.init_device_mesh("cpu", (1, 2)).shape, 2)
            [(1, 2), (1, 2)]
        """
        return self._layout.shape

    @property
    def ndim(self) -> int:
        """The number of axes.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.init_device_mesh("cpu", (1, 2)).ndim, 2)
            [2, 2]
        """
        return self._layout.ndim

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes, or None.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)).mesh_dim_names, 2)
            [('tp',), ('tp',)]
        """
        return self._layout.names

    @property
    def device_type(self) -> str:
        """The type of device that has the arrays, "cpu" or "cuda".

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.init_device_mesh("cpu", (2,)).device_type, 2)
            ['cpu', 'cpu']
        """
        return self._device_type

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks along the axis `mesh_dim`; None: of the whole mesh.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.init_device_mesh("cpu", (2, 1)).size(1), 2)
            [1, 1]
        """
        if mesh_dim is None:
            return self._layout.size
        return self.shape[self._layout.axis(mesh_dim)]

    # ---- The calling rank

    @explaining
    def get_rank(self) -> int:
        """Return the global rank of the caller.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.DeviceMesh("cpu", [1, 0]).get_rank(), 2)
            [0, 1]
        """
        return self._here().rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the caller's index along each axis, None on a rank outside the mesh.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.DeviceMesh("cpu", [[2], [0]]).get_coordinate(), 3)
            [(1, 0), None, (0, 0)]
        """
        self._here()
        return self._coordinate

    @explaining
    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the caller's index along the axis `mesh_dim`, which is its rank in that axis's group.

        Args:
            mesh_dim: Name or index of the axis. May be None on a mesh of one axis only.

        Raises:
            ValueError: `mesh_dim` is None on a mesh of several axes, or the caller is outside the mesh.
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.init_device_mesh("cpu", (2, 2)).get_local_rank(1), 4)
            [0, 1, 0, 1]
        """
        axis = self._one_axis("get_local_rank", mesh_dim)
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise ValueError(self._outside("DeviceMesh.get_local_rank", "only its members have an index along an axis"))
        return coordinate[axis]

    def _one_axis(self, method: str, mesh_dim: int | str | None, before: str = "mesh_dim=") -> int:
        """Return the index of an axis; the only one if it is None.

        Args:
            method: The method, for the error.
            mesh_dim: The axis.
            before: How the axis is written in a call of the method, up to its name.

        Raises:
            ValueError: It is None, and the mesh has several axes.
        """
        if mesh_dim is not None:
            return self._layout.axis(mesh_dim)
        if self.ndim > 1:
            choices: Sequence[int | str] = self._layout.names or range(self.ndim)
            raise ValueError(
                f"DeviceMesh.{method}: this mesh {self._layout.describe()} has {self.ndim} axes, so name one of"
                f" {', '.join(map(repr, choices))}, as in {method}({before}{choices[0]!r})"
            )
        return 0

    def _outside(self, what: str, why: str) -> str:
        root = self._root._layout
        return (
            f"{what}: rank {self.get_rank()} is outside the mesh {root.describe()} of"
            f" {ranks_text(root.ranks.reshape(-1))}; {why}, so go on only where mesh.get_coordinate() is not None"
        )

    # ---- Equality, pickling, printing, and the current mesh

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshState):
            return NotImplemented
        return self is other or (
            self._device_type == other._device_type
            and self._plane_known == other._plane_known
            and self._layout == other._layout
        )

    def __hash__(self) -> int:
        return hash((self._device_type, self._layout))

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_pickle, (type(self), self._device_type, self.mesh, self.mesh_dim_names, self._backends)

    def __repr__(self) -> str:
        return f"DeviceMesh({', '.join(self._parts())})"

    def __str__(self) -> str:
        # Not in repr, which debuggers and loggers call at any time: host names may need a request to the store.
        known = self._hosts() if self._plane_known else None
        hosts = None if known is None else hosts_text(self._layout, known)
        return f"DeviceMesh({', '.join(self._parts() if hosts is None else [*self._parts(), hosts])})"

    def _parts(self) -> list[str]:
        parts = [repr(self._device_type), self._layout.describe()]
        if self._world is not None:
            parts.append(position_text(self._layout, self._world, self._coordinate))
        if self._plane_known:
            parts.append(ranks_text(self._layout.ranks.reshape(-1)))
        return parts

    def __enter__(self) -> Self:
        """Make this the current mesh, which `get_current_mesh()` returns, until the block ends.

        Example:
            >>> import meshdist
            >>> def program():
            ...     with meshdist.init_device_mesh("cpu", (2,)) as mesh:
            ...         return meshdist.device_mesh.get_current_mesh() is mesh
            >>> meshdist.run(program, 2)
            [True, True]
        """
        entered.set((*entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the mesh of the block around this one current again."""
        entered.set(entered.get()[:-1])


# Immutable tuples, innermost mesh last, so that a task cannot change the context of its parent.
entered: ContextVar[tuple[MeshState, ...]] = ContextVar("meshdist_entered_meshes", default=())


def _from_pickle(
    kind: type[MeshState],
    device_type: str,
    ranks: Ranks,
    names: tuple[str, ...] | None,
    backends: tuple[str | None, ...],
) -> MeshState:
    """Make an equal mesh without a world: unpickling must not initialize one. The mesh binds to a world on use."""
    mesh = object.__new__(kind)
    mesh._store(device_type, Layout(ranks, names), backends, mesh)
    return mesh


MOST_HOSTS = 4


class MeshHosts:
    """The host of each rank: from the topology given to `init_device_mesh`, else from the world."""

    def __init__(self, world: World, topology: Topology | None) -> None:
        self._world = world
        self._topology = topology
        self.rank = world.rank

    def host_names(self) -> tuple[str, ...] | None:
        """Return the host name of every rank of the world, in rank order; None if unknown."""
        return self._world.host_names() if self._topology is None else self._topology.host_names

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        """Return a key of the host of each of these global ranks."""
        if self._topology is None:
            return self._world.hosts(ranks)
        names = self._topology.host_names
        return [names[rank] for rank in ranks]

    def of_group(self, group: ProcessGroup) -> list[str]:
        """Return a key of the host of each rank of a group."""
        # A group of another world, for example one before shrinking, has other rank numbers.
        return self.hosts(group.ranks) if self._world.holds(group) else group.hosts()


def coordinate_text(layout: Layout, coordinate: Sequence[int]) -> str:
    """Return `coordinate` with axis names: `(dp=1, tp=0)`, or `(1, 0)` without names."""
    if layout.names is None:
        return f"({', '.join(map(str, coordinate))})"
    return f"({', '.join(f'{name}={index}' for name, index in zip(layout.names, coordinate, strict=True))})"


def position_text(layout: Layout, world: World, coordinate: Sequence[int] | None) -> str:
    if coordinate is None:
        return f"rank {world.rank} is outside"
    return f"rank {world.rank} at {coordinate_text(layout, coordinate)}"


def hosts_text(layout: Layout, hosts: MeshHosts) -> str | None:
    """Return the number of the mesh's ranks on each host; None if the hosts are unknown."""
    try:
        names = hosts.host_names()
    except DistError:  # after the world was destroyed: print the mesh without hosts
        return None
    if names is None:
        return None
    counts = Counter(names[rank] for rank in layout.members()).most_common()
    shown = ", ".join(f"{host} ({count})" for host, count in counts[:MOST_HOSTS])
    more = f" and {len(counts) - MOST_HOSTS} more" if len(counts) > MOST_HOSTS else ""
    return f"ranks by host: {shown}{more}"
