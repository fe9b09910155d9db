"""DeviceMesh: ranks arranged along named axes, each axis with its process group, collectives on any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshdist.collectives.methods import CollectiveMethods
from meshdist.current import current_world
from meshdist.mesh.axis_backends import axis_backends, shared_backend
from meshdist.mesh.current_mesh import entered
from meshdist.mesh.layout import Layout
from meshdist.mesh.render import hosts_text, position_text, ranks_text
from meshdist.mesh.surroundings import check_carried, checked_device_type, world_or_init

if TYPE_CHECKING:
    from meshdist.mesh.rank_list import Ranks
    from meshdist.process_group import ProcessGroup
    from meshdist.world import World


class DeviceMesh(CollectiveMethods):
    """Arrange ranks along axes; every axis and every slice has its process group and all collectives.

    Every rank makes the same mesh, also the ranks outside it. Making it sends nothing: groups are computed, and
    connections come with the first call. If the default group is not initialised, it is, from the launcher's
    environment.

    `mesh["tp"]` is the row of this rank along that axis, `mesh["dp", "tp"]` its plane over both axes, in the order
    named; each is a DeviceMesh and the same object each time. A collective on a mesh runs over all its ranks, numbered
    in row-major order of its axes; `src` and `dst` are such numbers.

    On a rank outside the mesh `get_coordinate()` is None and asking for a group or a collective is a ValueError.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh: Global ranks, as nested lists or an integer array, in any arrangement; unique, and inside the world.
        mesh_dim_names: One unique name per axis.
        backend_override: Axis, by name or index, to the backend its group uses in place of the world's.

    Raises:
        ValueError: Ranks repeated or outside the world, names that do not fit, an unknown device type, or no default
            group and no launcher's environment to initialise it from.
        TypeError: Ranks that are not integers, names that are not strings.

    Example:
        >>> import numpy as np, meshdist
        >>> def program():
        ...     mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        ...     x = np.array([float(mesh.get_rank())])
        ...     return mesh["tp"].all_reduce(x).item(), mesh["tp"].mesh.tolist()
        >>> meshdist.run(program, 4)
        [(1.0, [0, 1]), (1.0, [0, 1]), (5.0, [2, 3]), (5.0, [2, 3])]
    """

    _layout: Layout
    _device_type: str
    _backends: tuple[str | None, ...]
    _root_axes: tuple[int, ...]  # which axes of the root these are
    _root: DeviceMesh
    _family: dict[tuple[int, ...], DeviceMesh]  # of the root: all its slices, by root axes
    _slices: dict[str | tuple[str, ...], DeviceMesh]  # by what was written in the brackets
    _axis_groups: dict[int, ProcessGroup]
    _flat_group: ProcessGroup | None
    _world: World | None
    _coordinate: tuple[int, ...] | None
    _plane_known: bool

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, str] | None = None,
    ) -> None:
        checked_device_type(device_type)
        layout = Layout(mesh, mesh_dim_names)
        backends = axis_backends(layout, backend_override)
        check_carried(device_type, backends)
        self._store(device_type, layout, backends)
        self._bind(world_or_init())

    def _store(self, device_type: str, layout: Layout, backends: tuple[str | None, ...]) -> None:
        """Set the fields of a mesh that is not a slice and does not know its world yet."""
        self._device_type = device_type
        self._layout = layout
        self._backends = backends
        self._root_axes = tuple(range(layout.ndim))
        self._root = self
        self._family = {self._root_axes: self}
        self._slices = {}
        self._axis_groups = {}
        self._flat_group = None
        self._world = None
        self._coordinate = None
        self._plane_known = True

    def _bind(self, world: World) -> World:
        """Find this rank's place in the mesh, once."""
        highest = int(self._layout.ranks.max())
        if highest >= world.size:
            raise ValueError(
                f"DeviceMesh {self._layout.describe()}: its ranks must lie in 0..{world.size - 1}, as the world has"
                f" {world.size}, got rank {highest}; start more ranks or make the mesh of fewer"
            )
        self._coordinate = self._layout.coordinate(world.rank)
        self._world = world
        return world

    def _here(self) -> World:
        """Return the world this mesh stands in; one that came out of a pickle takes the current one."""
        return self._bind(current_world()) if self._world is None else self._world

    # ---- What the mesh is

    @property
    def mesh(self) -> Ranks:
        """The global ranks of this mesh, a read-only integer array of its shape.

        Raises:
            ValueError: This is a slice and the calling rank is outside the mesh, so it has no row or plane.
        """
        if not self._plane_known:
            raise ValueError(
                self._outside("DeviceMesh.mesh", "a slice holds the calling rank's row, and this rank has none")
            )
        return self._layout.ranks

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self._layout.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._layout.ndim

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes, or None."""
        return self._layout.names

    @property
    def device_type(self) -> str:
        """Where the arrays live: "cpu" or "cuda"."""
        return self._device_type

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks along the axis `mesh_dim`, of the whole mesh where it is None.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
        """
        if mesh_dim is None:
            return self._layout.size
        return self.shape[self._layout.axis(mesh_dim)]

    # ---- Where this rank is

    def get_rank(self) -> int:
        """Return the global rank of the caller."""
        return self._here().rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the caller's index along each axis, None on a rank outside the mesh."""
        self._here()
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the caller's index along the axis `mesh_dim`, which is its rank in that axis's group.

        Args:
            mesh_dim: Name or index of the axis. May be None on a mesh of one axis only.

        Raises:
            ValueError: `mesh_dim` is None on a mesh of several axes, or the caller is outside the mesh.
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
        """
        axis = self._one_axis("get_local_rank", mesh_dim)
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise ValueError(self._outside("DeviceMesh.get_local_rank", "only its members have an index along an axis"))
        return coordinate[axis]

    # ---- Groups

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group of the ranks along the axis `mesh_dim` that the caller is in.

        Args:
            mesh_dim: Name or index of the axis. May be None on a mesh of one axis only.

        Raises:
            ValueError: `mesh_dim` is None on a mesh of several axes, or the caller is outside the mesh.
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
        """
        axis = self._one_axis("get_group", mesh_dim)
        group = self._axis_groups.get(axis)
        if group is None:
            coordinate = self.get_coordinate()
            if coordinate is None:
                raise ValueError(self._outside("DeviceMesh.get_group", "only its members have groups in it"))
            members = tuple(self._layout.row(axis, coordinate).tolist())
            name = f"axis {axis}" if self._layout.names is None else self._layout.names[axis]
            group = self._here().shared_group(members, backend=self._backends[axis], desc=name)
            self._axis_groups[axis] = group
        return group

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the caller's group along each axis, in the order of the axes."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    @property
    def collective_group(self) -> ProcessGroup:
        """The group over all ranks of this mesh in row-major order, on which its collectives run.

        An axis's own group where the mesh has one axis. Over several axes it uses the backend that all of them were
        given by `backend_override`, else the world's.

        Raises:
            ValueError: The caller is outside the mesh.
        """
        if self._flat_group is None:
            if self.get_coordinate() is None:
                raise ValueError(self._outside("DeviceMesh", "only its members may call its collectives"))
            name = ",".join(self._layout.names) if self._layout.names else "mesh"
            self._flat_group = (
                self.get_group(0)
                if self.ndim == 1
                else self._here().shared_group(
                    self._layout.members(), backend=shared_backend(self._backends), desc=name
                )
            )
        return self._flat_group

    def _one_axis(self, method: str, mesh_dim: int | str | None) -> int:
        if mesh_dim is not None:
            return self._layout.axis(mesh_dim)
        if self.ndim > 1:
            choices: Sequence[int | str] = self._layout.names or range(self.ndim)
            raise ValueError(
                f"DeviceMesh.{method}: this mesh {self._layout.describe()} has {self.ndim} axes, so name one of"
                f" {', '.join(map(repr, choices))}"
            )
        return 0

    def _outside(self, what: str, why: str) -> str:
        root = self._root._layout
        return (
            f"{what}: rank {self.get_rank()} is outside the mesh {root.describe()} of {ranks_text(root)}; {why},"
            " so go on only where mesh.get_coordinate() is not None"
        )

    # ---- Slices

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the slice over the named axes, in this order, that holds the calling rank; the same object each time.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError); the message lists the axes.
            ValueError: An axis named twice, none named, or a mesh without names.
            TypeError: Something other than names.
        """
        try:
            found = self._slices.get(mesh_dim_names)
        except TypeError:  # a list or the like, which cannot be a key: refused below
            found = None
        return self._slice(mesh_dim_names) if found is None else found

    def _slice(self, names: str | tuple[str, ...]) -> DeviceMesh:
        axes = self._named_axes(names)
        root_axes = tuple(self._root_axes[axis] for axis in axes)
        family = self._root._family
        found = family.get(root_axes)
        if found is None:
            # setdefault: of two threads that slice at once, both get the one mesh.
            found = family.setdefault(root_axes, self._sub_mesh(axes))
        return self._slices.setdefault(names, found)

    def _named_axes(self, names: str | tuple[str, ...]) -> list[int]:
        if self._layout.names is None:
            raise ValueError(
                f"DeviceMesh[{names!r}]: this mesh {self._layout.describe()} has no axis names to slice by;"
                " give mesh_dim_names when making it"
            )
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, tuple) or not all(isinstance(name, str) for name in wanted):
            raise TypeError(
                f'DeviceMesh[...]: expected axis names, as in mesh["{self._layout.names[0]}"], got {names!r}'
                f" ({type(names).__name__})"
            )
        if not wanted or len(set(wanted)) < len(wanted):
            raise ValueError(
                f"DeviceMesh[{names!r}]: name at least one axis, and each once, of"
                f" {', '.join(map(repr, self._layout.names))}"
            )
        return [self._layout.axis(name) for name in wanted]

    def _sub_mesh(self, axes: Sequence[int]) -> DeviceMesh:
        coordinate = self.get_coordinate()
        mesh = object.__new__(DeviceMesh)
        # On a rank outside, the plane through the origin stands in for shape and names; `mesh` does not show it.
        layout = self._layout.select(axes, coordinate or (0,) * self.ndim)
        mesh._store(self._device_type, layout, tuple(self._backends[axis] for axis in axes))
        mesh._root_axes = tuple(self._root_axes[axis] for axis in axes)
        mesh._root = self._root
        mesh._world = self._here()
        mesh._coordinate = None if coordinate is None else tuple(coordinate[axis] for axis in axes)
        mesh._plane_known = coordinate is not None or (self._plane_known and len(axes) == self.ndim)
        return mesh

    # ---- As a value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self is other or (
            self._device_type == other._device_type
            and self._plane_known == other._plane_known
            and self._layout == other._layout
        )

    def __hash__(self) -> int:
        return hash((self._device_type, self._layout))

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_pickle, (self._device_type, self.mesh, self.mesh_dim_names, self._backends)

    def __repr__(self) -> str:
        return f"DeviceMesh({', '.join(self._parts())})"

    def __str__(self) -> str:
        # Apart from repr, which debuggers and logs call at any moment: host names may have to be asked for.
        hosts = hosts_text(self._layout, self._world) if self._world is not None and self._plane_known else None
        return f"DeviceMesh({', '.join(self._parts() if hosts is None else [*self._parts(), hosts])})"

    def _parts(self) -> list[str]:
        parts = [repr(self._device_type), self._layout.describe()]
        if self._world is not None:
            parts.append(position_text(self._layout, self._world, self._coordinate))
        if self._plane_known:
            parts.append(ranks_text(self._layout))
        return parts

    # ---- As a context

    def __enter__(self) -> DeviceMesh:
        """Make this the current mesh, which `get_current_mesh()` returns, until the block ends."""
        entered.set((*entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the mesh of the block around this one current again."""
        entered.set(entered.get()[:-1])


def _from_pickle(
    device_type: str, ranks: Ranks, names: tuple[str, ...] | None, backends: tuple[str | None, ...]
) -> DeviceMesh:
    """Make an equal mesh without a world: reading a file must not start a job. It takes the current one when used."""
    mesh = object.__new__(DeviceMesh)
    mesh._store(device_type, Layout(ranks, names), backends)
    return mesh
