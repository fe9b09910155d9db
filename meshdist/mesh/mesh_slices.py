"""MeshSlices: the rows and planes of a mesh that the calling rank is in, found by the names of axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshdist.mesh.axis_names import UnknownAxisError
from meshdist.mesh.layout import Layout
from meshdist.mesh.mesh_groups import MeshGroups
from meshdist.mesh.strides import Axis, extent_of

if TYPE_CHECKING:
    from typing_extensions import Self


class MeshSlices(MeshGroups):
    """Find the slices of a mesh. All meshes derived from one root are one family, in which equal ones are one object.

    Example:
        >>> import meshdist
        >>> issubclass(meshdist.DeviceMesh, MeshSlices)
        True
    """

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> Self:
        """Return the slice over the named axes, in this order, that holds the calling rank; the same object each time.

        The names are those of this mesh's axes, and of axes that were flattened from meshes of its family and lie
        inside it.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError); the message lists the axes.
            ValueError: An axis named twice, none named, axes that overlap, or a mesh without names.
            TypeError: Something other than names.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     return mesh["tp"].mesh.tolist(), mesh["tp", "dp"].mesh.tolist()
            >>> meshdist.run(program, 4)[3]
            ([2, 3], [[0, 2], [1, 3]])
        """
        try:
            found = self._slices.get(mesh_dim_names)
        except TypeError:  # a list or the like, which cannot be a key: refused below
            found = None
        return self._slice(mesh_dim_names) if found is None else found

    # Not even by way of __getitem__, which takes names: nobody could say whether its axes come or its ranks.
    __iter__ = None

    def __contains__(self, name: object) -> bool:
        """Return whether `mesh[name]` is there: the name of an axis, or of a flattened one that lies inside this mesh.

        Raises:
            TypeError: It is no string. Whether a rank is in the mesh, `mesh.mesh` knows.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     _ = mesh.flatten("all")
            ...     return "tp" in mesh, "all" in mesh, "pp" in mesh
            >>> meshdist.run(program, 4)[0]
            (True, True, False)
        """
        if not isinstance(name, str):
            raise TypeError(
                f"'in' asks a DeviceMesh for the name of an axis, got {name!r} ({type(name).__name__}); for a rank,"
                " write: rank in mesh.mesh"
            )
        return name in (self._layout.names or ()) or name in self._flattened_here()

    def _slice(self, names: str | tuple[str, ...]) -> Self:
        wanted = self._checked_names(names)
        own = self._layout.names or ()
        if all(name in own for name in wanted):
            found = self._select([own.index(name) for name in wanted])
        else:
            found = self._with_flattened(wanted)
        return self._slices.setdefault(names, found)

    def _checked_names(self, names: str | tuple[str, ...]) -> tuple[str, ...]:
        known = (*(self._layout.names or ()), *self._flattened_here())
        if not known:
            raise ValueError(
                f"DeviceMesh[{names!r}]: this mesh {self._layout.describe()} has no axis names to slice by;"
                " give mesh_dim_names when making it"
            )
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, tuple) or not all(isinstance(name, str) for name in wanted):
            raise TypeError(
                f'DeviceMesh[...]: expected axis names, as in mesh["{known[0]}"], got {names!r}'
                f" ({type(names).__name__})"
            )
        repeated = sorted({name for name in wanted if wanted.count(name) > 1})
        if not wanted or repeated:
            raise ValueError(
                f"DeviceMesh[{names!r}]: name at least one axis, and each once, of {', '.join(map(repr, known))};"
                f" got {'repeated: ' + ', '.join(map(repr, repeated)) if repeated else 'none'}"
            )
        for name in wanted:
            if name not in known:
                raise UnknownAxisError(
                    f"unknown axis {name!r}: this mesh is {self._layout.describe()}, its axes are"
                    f" {', '.join(map(repr, known))}"
                )
        return wanted

    def _flattened_here(self) -> list[str]:
        """Return the names of the family's flattened axes that lie inside this mesh."""
        own = self._layout.names or ()
        flattened = self._root._flattened.items()
        return [name for name, (axis, _) in flattened if name not in own and self._layout.holds([axis])]

    def _with_flattened(self, names: Sequence[str]) -> Self:
        pairs = zip(self._layout.axes, self._backends, strict=True)
        own = {} if self._layout.names is None else dict(zip(self._layout.names, pairs, strict=True))
        chosen = [own[name] if name in own else self._root._flattened[name] for name in names]
        axes = tuple(axis for axis, _ in chosen)
        if not self._layout.holds(axes):
            raise ValueError(
                f"DeviceMesh[{', '.join(map(repr, names))}]: these axes overlap, so that ranks would be in a slice"
                f" twice; name axes of {self._layout.describe()} and of those flattened from it that share none"
            )
        return self._over(axes, tuple(names), tuple(backend for _, backend in chosen))

    def _select(self, axes: Sequence[int]) -> Self:
        """Return the slice over some axes, by number."""
        names = None if self._layout.names is None else tuple(self._layout.names[axis] for axis in axes)
        backends = tuple(self._backends[axis] for axis in axes)
        # On a rank outside, the plane through the origin stands in for shape and names; `mesh` does not show it.
        origin = self.get_coordinate() or (0,) * self.ndim
        return self._member_of_family(
            tuple(self._layout.axes[axis] for axis in axes),
            names,
            backends,
            lambda: self._layout.select(axes, origin),
            len(axes) == self.ndim,
        )

    def _over(self, axes: tuple[Axis, ...], names: tuple[str, ...] | None, backends: tuple[str | None, ...]) -> Self:
        """Return the mesh over any axes of the family that fit together, through the calling rank."""
        through = self._layout.first_rank() if self.get_coordinate() is None else self.get_rank()
        root = self._root._layout
        is_whole = math.prod(map(extent_of, axes)) == root.size
        return self._member_of_family(axes, names, backends, lambda: root.over(axes, names, through), is_whole)

    def _member_of_family(
        self,
        axes: tuple[Axis, ...],
        names: tuple[str, ...] | None,
        backends: tuple[str | None, ...],
        layout: Callable[[], Layout],
        is_whole: bool = True,
    ) -> Self:
        """Return the family's one mesh over these axes of the root's list of ranks.

        Args:
            axes: The axes in the list.
            names: One per axis, or None.
            backends: One per axis.
            layout: Makes the layout where there is no such mesh yet.
            is_whole: Whether it has all ranks that this mesh has.
        """
        family = self._root._family
        key = axes, names, backends
        found = family.get(key)
        if found is None:
            # setdefault: of two threads that slice at once, both get the one mesh.
            found = family.setdefault(key, self._made(layout(), backends, is_whole))
        return found

    def _made(self, layout: Layout, backends: tuple[str | None, ...], is_whole: bool) -> Self:
        world = self._here()
        mesh = object.__new__(type(self))
        mesh._store(self._device_type, layout, backends, self._root)
        mesh._world = world
        mesh._coordinate = None if self._coordinate is None else layout.coordinate(world.rank)
        # Outside, what has all ranks of a mesh that is known is known too.
        mesh._plane_known = self._coordinate is not None or (self._plane_known and is_whole)
        return mesh
