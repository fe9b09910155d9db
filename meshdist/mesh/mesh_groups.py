"""MeshGroups: the process groups of a mesh, one per axis and one over all axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshdist.mesh.layout.strides import Axis, joined
from meshdist.mesh.mesh_arguments import BackendWithOptions, shared_backend
from meshdist.mesh.mesh_state import MeshState
from meshdist.system.name_hints import explaining

# Labels of groups of a mesh without axis names.
_STOPGAP = r"axis \d+|mesh"  # a pattern, compiled at its first use

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup


class MeshGroups(MeshState):
    """The groups of a mesh. Groups of equal members and backend are one object in the whole family."""

    @explaining
    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group of the ranks along the axis `mesh_dim` that the caller is in.

        Args:
            mesh_dim: Name or index of the axis, or the name of a flattened axis inside this mesh. May be None on a mesh
                of one axis only.

        Raises:
            ValueError: `mesh_dim` is None on a mesh of several axes, or the caller is outside the mesh.
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     assert mesh["dp"].get_group() is mesh.get_group("dp")
            ...     return mesh.get_group("dp").ranks
            >>> meshdist.run(program, 4)
            [(0, 2), (1, 3), (0, 2), (1, 3)]
        """
        if type(mesh_dim) is int and self._world is not None:
            known = self._axis_groups.get(mesh_dim)
            if known is not None:
                return known
        if isinstance(mesh_dim, str) and mesh_dim not in (self._layout.names or ()):
            flattened = self._root._flattened.get(mesh_dim)
            if flattened is not None and self._layout.holds([flattened[0]]):
                axis, backend = flattened
                return self._group_along(
                    "get_group",
                    axis,
                    backend,
                    mesh_dim,
                    lambda: self._layout.over([axis], None, self.get_rank()).members(),
                )
        number = self._one_axis("get_group", mesh_dim)
        group = self._axis_groups.get(number)
        if group is None:
            name = f"axis {number}" if self._layout.names is None else self._layout.names[number]
            group = self._axis_groups[number] = self._group_along(
                "get_group", self._layout.axes[number], self._backends[number], name, lambda: self._row(number)
            )
        return group

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the caller's group along each axis, in the order of the axes.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2))
            ...     return [group.ranks for group in mesh.get_all_groups()]
            >>> meshdist.run(program, 4)[3]
            [(1, 3), (2, 3)]
        """
        return [self.get_group(axis) for axis in range(self.ndim)]

    @property
    def collective_group(self) -> ProcessGroup:
        """The group over all ranks of this mesh in row-major order, on which its collectives run.

        On a mesh of one axis, the group of that axis. Over several axes it uses their common backend from
        `backend_override`, else the world's.

        Raises:
            ValueError: The caller is outside the mesh.

        Example:
            >>> import meshdist
            >>> meshdist.run(lambda: meshdist.DeviceMesh("cpu", [[2, 0], [1, 3]]).collective_group.ranks, 4)[0]
            (2, 0, 1, 3)
        """
        group = self._flat_group
        if group is None:
            name = ",".join(self._layout.names) if self._layout.names else "axis 0" if self.ndim == 1 else "mesh"
            backend = shared_backend(self._backends)
            group = self._flat_group = self._group_along(
                "", joined(self._layout.axes), backend, name, self._layout.members
            )
        return group

    def _row(self, axis: int) -> tuple[int, ...]:
        assert self._coordinate is not None, "asked on members only"
        return tuple(self._layout.row(axis, self._coordinate).tolist())

    def _group_along(
        self, method: str, axis: Axis, backend: str | None, desc: str, members: Callable[[], tuple[int, ...]]
    ) -> ProcessGroup:
        """Return the caller's group along an axis of the root's list; `members` gives the ranks of a new group."""
        if self.get_coordinate() is None:
            what, why = (
                (f"DeviceMesh.{method}", "only its members have groups in it")
                if method
                else ("DeviceMesh", "only its members may call its collectives")
            )
            raise ValueError(self._outside(what, why))
        root = self._root
        group = root._groups.get((axis, backend))
        if group is None:
            group = root._groups.setdefault((axis, backend), self._made_group(members(), backend, desc))
            self._rest_on_agreement(group)
        return group

    def _take_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Adopt existing groups: one for each axis, or one for all axes together."""
        if len(groups) == 1:
            self._groups[joined(self._layout.axes), self._backends[0]] = groups[0]
        else:
            self._groups.update(zip(zip(self._layout.axes, self._backends, strict=True), groups, strict=True))
            self._axis_groups.update(enumerate(groups))
        for group in groups:
            self._rest_on_agreement(group)

    def _rest_on_agreement(self, group: ProcessGroup) -> None:
        if self._root._agreement is not None:
            self._here().add_precondition(group, self._root._agreement.broken)

    def _made_group(self, members: tuple[int, ...], backend: str | None, desc: str) -> ProcessGroup:
        universe = self._root._universe
        if universe is not None and members == universe.ranks and backend in (None, universe.backend_name):
            group = universe
        else:
            group = self._here().shared_group(members, backend=backend, desc=desc)
        if isinstance(backend, BackendWithOptions):
            _give_options(group, backend)
        if self._layout.names is not None and re.fullmatch(_STOPGAP, group.label):
            group.relabel(desc)  # made first by a mesh without names
        return group


def _give_options(group: ProcessGroup, backend: BackendWithOptions) -> None:
    if group.pg_options is None and not group.has_backend:
        group.pg_options = backend.options
    elif group.pg_options is not backend.options and group.pg_options != backend.options:
        raise ValueError(
            f"backend_override: {group!r} already exists, with the options {group.pg_options!r} and not"
            f" {backend.options!r}; create a group with new_group(pg_options=...) and the mesh with from_group"
        )
