"""DeviceMesh: ranks arranged along named axes, each axis with its process group, collectives on any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdist.current import GroupLike, current_world
from meshdist.mesh.agreement import agree, refusals_told, refusals_told_in
from meshdist.mesh.axis_backends import BackendChoice, axis_backends
from meshdist.mesh.concatenation import concatenated_axes, concatenated_ranks
from meshdist.mesh.given_groups import (
    check_inside,
    group_backend,
    groups_of,
    layout_of_groups,
    name_of_ranks,
    ranks_of_groups,
    universe_of,
)
from meshdist.mesh.layout import Layout
from meshdist.mesh.mesh_arrangements import MeshArrangements
from meshdist.mesh.mesh_value import MeshValue
from meshdist.mesh.mesh_views import MeshViews
from meshdist.mesh.surroundings import check_carried, checked_device_type, world_ended_on_refusal, world_or_init


class DeviceMesh(MeshArrangements, MeshValue, MeshViews):
    """Arrange ranks along axes; every axis and every slice has its process group and all collectives.

    Every rank makes the same meshes in the same order, also the ranks outside them. Making one is a single request to
    the store, in which the ranks' meshes are compared, and waits for nobody; groups are computed, and connections come
    with the first call. A rank whose mesh is another than that of the first raises at once; the others raise at the
    latest in the first call of a group of the mesh. If the default group is not initialised, it is, from the
    launcher's environment.

    `mesh["tp"]` is the row of this rank along that axis, `mesh["dp", "tp"]` its plane over both axes, in the order
    named; each is a DeviceMesh and the same object each time. A collective on a mesh runs over all its ranks, numbered
    in row-major order of its axes; `src` and `dst` are such numbers.

    On a rank outside the mesh `get_coordinate()` is None and asking for a group or a collective is a ValueError.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh: Global ranks, as nested lists or an integer array, in any arrangement; unique, and inside the world.
        mesh_dim_names: One unique name per axis.
        backend_override: Axis, by name or index, to the backend its group uses in place of the world's, or
            to a pair of it and its options, which are what `new_group` calls `pg_options`.
        group: A process group or another mesh, to make a mesh inside it: only its ranks make it, and only they are
            in it. The world where None.

    Raises:
        ValueError: Ranks repeated or outside the world or the group, names that do not fit, an unknown device type, no
            default group and no launcher's environment to initialise it from; or another rank made another mesh.
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

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, BackendChoice] | None = None,
        group: GroupLike = None,
    ) -> None:
        universe = universe_of(group)
        with world_ended_on_refusal(), refusals_told(universe):
            checked_device_type(device_type)
            layout = Layout(mesh, mesh_dim_names)
            inherited = group_backend(universe)
            given = axis_backends(layout, backend_override)
            backends = tuple(inherited if backend is None else backend for backend in given)
            check_carried(device_type, backends)
            self._store(device_type, layout, backends, self)
            self._universe = universe
            world = self._bind(world_or_init())
            if universe is not None:
                check_inside(layout, universe)
        within = universe or world.default_group
        self._agreement = agree(world, within.name, within.size(), device_type, layout, backends)

    @staticmethod
    def from_group(
        group: GroupLike | Sequence[GroupLike],
        device_type: str,
        mesh: Any = None,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return a mesh whose axes have groups that are there already.

        The ranks of the mesh call it, each with its own groups.

        Args:
            group: A process group, whose ranks are the mesh in its order; or a list of groups, one per axis, each the
                calling rank's row along it.
            device_type: "cpu" or "cuda", without an index.
            mesh: Global ranks by axes, as nested lists or an integer array. Needed with several groups; with one, the
                ranks of the group, along any number of axes.
            mesh_dim_names: One unique name per axis.

        Raises:
            ValueError: The groups are not the rows of the mesh, the calling rank is not in them, or another rank made
                another mesh; see DeviceMesh for the rest.
            TypeError: They are no groups; see DeviceMesh for the rest.

        Example:
            >>> import meshdist
            >>> def program():
            ...     pair, _ = meshdist.new_subgroups(2)
            ...     mesh = DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("tp",))
            ...     return mesh.get_group("tp") is pair, mesh.mesh.tolist()
            >>> meshdist.run(program, 4)[3]
            (True, [2, 3])
        """
        groups = groups_of(group)
        ranks = ranks_of_groups(groups, mesh)
        universe = name_of_ranks(ranks)
        with refusals_told_in(universe, ranks.size):
            checked_device_type(device_type)
            layout = layout_of_groups(groups, mesh, mesh_dim_names)
            backends = tuple(group_backend(one) for one in groups * (layout.ndim if len(groups) == 1 else 1))
            check_carried(device_type, backends)
        world = current_world()
        made = object.__new__(DeviceMesh)
        made._store(device_type, layout, backends, made)
        made._bind(world)
        made._agreement = agree(world, universe, layout.size, device_type, layout, backends)
        made._take_groups(groups)
        return made

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh], axis: int | str | None = None) -> DeviceMesh:
        """Return the mesh over the axes of several, or several meshes one after the other along an axis.

        Args:
            meshes: Without `axis`: meshes derived from one, with axes that do not overlap; the result has all of these
                axes, in this order. With `axis`: meshes of the same axes, such as `split` returns, and no rank in
                common.
            axis: The axis along which they follow each other, by name or index.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
            ValueError: Meshes that do not go together; says why.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     assert DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]) is mesh["tp", "dp"]
            ...     return DeviceMesh.concatenate(mesh.split("tp", 2), "dp").mesh.tolist()
            >>> meshdist.run(program, 4)[0]
            [[0], [2], [1], [3]]
        """
        given = list(meshes)
        if not given or not all(isinstance(mesh, DeviceMesh) for mesh in given):
            raise TypeError(f"concatenate: expected a list of at least one DeviceMesh, got {meshes!r}")
        return concatenated_axes(given) if axis is None else concatenated_ranks(given, axis)

    # ---- What torch calls some of these

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        return self._rows(mesh_dim_name)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: BackendChoice | None = None) -> DeviceMesh:
        return self.flatten(mesh_dim_name, backend_override)

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, BackendChoice] | None = None,
    ) -> DeviceMesh:
        return self.unflatten(dim, mesh_sizes, mesh_dim_names, backend_override)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        return DeviceMesh.concatenate(device_mesh_list)

    _split = MeshArrangements.split
    _transpose = MeshArrangements.transpose
