"""MeshSlices: slices of a mesh by axis names, and meshes of the same ranks with other axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshdist.mesh.layout.axes_and_chunks import checked_sizes, part_sizes, unknown_axis
from meshdist.mesh.layout.layout import Layout
from meshdist.mesh.layout.strides import Axis, extent_of, joined
from meshdist.mesh.mesh_arguments import BackendChoice, axis_backends, shared_backend
from meshdist.mesh.mesh_groups import MeshGroups
from meshdist.system.name_hints import explaining
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from typing_extensions import Self


class MeshSlices(MeshGroups):
    """The slices of a mesh. Meshes derived from one root are a family; equal meshes of a family are one object."""

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> Self:
        """Return the slice over the named axes, in this order, through the calling rank; the same object each time.

        Names are those of this mesh's axes, and of flattened axes of its family that lie inside it.

        Raises:
            UnknownAxisError: The mesh has no such axis; the message lists the axes. The error is both a KeyError and a
                ValueError.
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
        except TypeError:  # unhashable, such as a list: refused below
            found = None
        return self._slice(mesh_dim_names) if found is None else found

    # Not iterable through __getitem__, which takes names: iterating axes or ranks would be ambiguous.
    __iter__ = None

    def __contains__(self, name: object) -> bool:
        """Return whether `mesh[name]` exists: `name` is an axis, or a flattened axis inside this mesh.

        Raises:
            TypeError: `name` is not a string. For ranks, use `mesh.mesh`.

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
                " pass mesh_dim_names when creating it"
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
                raise unknown_axis(name, self._layout.describe(), known)
        return wanted

    def _flattened_here(self) -> list[str]:
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
        names = None if self._layout.names is None else tuple(self._layout.names[axis] for axis in axes)
        backends = tuple(self._backends[axis] for axis in axes)
        # On a rank outside, the plane through the origin gives shape and names; `mesh` does not show it.
        origin = self.get_coordinate() or (0,) * self.ndim
        return self._member_of_family(
            tuple(self._layout.axes[axis] for axis in axes),
            names,
            backends,
            lambda: self._layout.select(axes, origin),
            len(axes) == self.ndim,
        )

    def _over(self, axes: tuple[Axis, ...], names: tuple[str, ...] | None, backends: tuple[str | None, ...]) -> Self:
        """Return the mesh over any compatible axes of the family that contains the calling rank."""
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
        """Return the family's mesh over these axes of the root's list of ranks; `layout` makes a new one.

        `is_whole` tells whether it has all ranks of this mesh.
        """
        family = self._root._family
        key = axes, names, backends
        found = family.get(key)
        if found is None:
            # setdefault: two threads that slice concurrently get the same mesh.
            found = family.setdefault(key, self._made(layout(), backends, is_whole))
        return found

    def _made(self, layout: Layout, backends: tuple[str | None, ...], is_whole: bool) -> Self:
        world = self._here()
        mesh = object.__new__(type(self))
        mesh._store(self._device_type, layout, backends, self._root)
        mesh._world = world
        mesh._coordinate = None if self._coordinate is None else layout.coordinate(world.rank)
        # On a rank outside, the plane is known if this mesh is known and the result has all its ranks.
        mesh._plane_known = self._coordinate is not None or (self._plane_known and is_whole)
        return mesh

    # ---- Rearranged axes

    @explaining
    def flatten(
        self,
        name: str | None = None,
        backend_override: BackendChoice | None = None,
        *,
        axes: Sequence[int | str] | None = None,
    ) -> Self:
        """Return this mesh with all its axes, or some of them, joined into one; the same object each time.

        The last axis varies fastest. Axes need not be adjacent: `mesh["pp", "tp"].flatten()` is the calling
        rank's plane over both as one row. Meshes that contain the new axis find it by name, as in
        `mesh["pp_tp"]`.

        Args:
            name: The name of the new axis; None: the names of its axes joined by "_".
            backend_override: The backend of the new axis; None: the common one of its axes, else the world's.
            axes: The axes to flatten, by name or index, slowest first; the new axis replaces the first one named. None:
                all axes, into a mesh of one axis.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            ValueError: An axis is given twice, or another axis has the name.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            ...     row = mesh["pp", "tp"].flatten()
            ...     assert mesh["pp_tp"] is row
            ...     return row.mesh.tolist(), mesh.flatten(axes=("dp", "tp")).mesh.tolist()
            >>> meshdist.run(program, 8)[7]
            ([2, 3, 6, 7], [[0, 1, 2, 3], [4, 5, 6, 7]])
        """
        numbers = list(range(self.ndim)) if axes is None else self._distinct("flatten", axes)
        names = self._layout.names
        if name is None and names is not None:
            name = "_".join(names[number] for number in numbers)
        layout = self._layout.flatten(numbers, name)
        one = joined(self._layout.axes[number] for number in numbers)
        if backend_override is None:
            backend = shared_backend([self._backends[number] for number in numbers])
        else:
            backend = axis_backends(self._layout, {0: backend_override})[0]
        if name is not None:
            self._name_flattened(name, one, backend)
        others = [number for number in range(self.ndim) if number not in numbers]
        backends = [self._backends[number] for number in others]
        backends.insert(sum(number < numbers[0] for number in others), backend)
        return self._member_of_family(layout.axes, layout.names, tuple(backends), lambda: layout)

    @explaining
    def unflatten(
        self,
        axis: int | str,
        sizes: Sequence[int],
        names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, BackendChoice] | None = None,
    ) -> Self:
        """Return this mesh with one axis split into several, the last one fastest; the same object each time.

        Args:
            axis: The axis to split, by name or index.
            sizes: The number of ranks along each new axis; the product is the size of `axis`.
            names: One per new axis if this mesh has names.
            backend_override: A dict that maps a new axis, by name or by index among the new ones, to its backend. None:
                that of `axis`.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            ValueError: The product differs, a size is below 1, or the names do not fit.
            TypeError: Sizes that are not integers, names that are not strings.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
            ...     return mesh.unflatten("dp", (2, 2), ("replicate", "shard"))["shard"].mesh.tolist()
            >>> meshdist.run(program, 4)
            [[0, 1], [0, 1], [2, 3], [2, 3]]
        """
        number = self._layout.axis(axis)
        extents = checked_sizes("unflatten: sizes", sizes)
        layout = self._layout.unflatten(number, extents, names)
        new = slice(number, number + len(extents))
        made = layout.select(range(layout.ndim)[new], (0,) * layout.ndim)
        given = axis_backends(made, backend_override)
        inherited = tuple(self._backends[number] if backend is None else backend for backend in given)
        backends = (*self._backends[:number], *inherited, *self._backends[number + 1 :])
        if layout.shares_list(self._layout):
            return self._member_of_family(layout.axes, layout.names, backends, lambda: layout)
        return self._kept(
            ("unflatten", number, extents, layout.names, backends), lambda: [self._new_root(layout, backends)]
        )[0]

    def transpose(self, *axes: int | str) -> Self:
        """Return this mesh with its axes in a different order; the same object each time.

        Args:
            axes: All axes, by name or index, in their new order. None given: the reverse order.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            ValueError: An axis is repeated or missing.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     assert mesh.transpose() is mesh.transpose("tp", "dp") is mesh["tp", "dp"]
            ...     return mesh.transpose().mesh.tolist()
            >>> meshdist.run(program, 4)[0]
            [[0, 2], [1, 3]]
        """
        order: Sequence[int | str] = axes
        if len(axes) == 1 and isinstance(axes[0], (tuple, list)):  # as NumPy's takes them
            order = axes[0]
        numbers = self._distinct("transpose", order) if axes else list(reversed(range(self.ndim)))
        if len(numbers) < self.ndim:
            raise ValueError(
                f"transpose: name all {counted(self.ndim, 'axis', 'axes')} of {self._layout.describe()}, got"
                f" {list(order)}; to leave some out, take a slice"
            )
        return self._select(numbers)

    @explaining
    def split(self, axis: int | str, parts: int | Sequence[int]) -> list[Self]:
        """Return the parts of this mesh along one axis, in order; the same meshes each time.

        Each rank is in one part and outside the others, where `get_coordinate()` is None. Each part has the axes of
        this mesh, with fewer ranks along `axis`.

        Args:
            axis: The axis, by name or index.
            parts: The number of equal parts, or the size of each part along the axis.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            ValueError: The parts do not add up to the axis; or this is a slice, and the caller is outside the mesh.
            TypeError: `parts` are not integers.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            ...     train, evaluate = mesh.split("dp", (2, 1))
            ...     return train.mesh.tolist(), evaluate.get_coordinate()
            >>> meshdist.run(program, 6)[5]
            ([[0, 1], [2, 3]], (0, 1))
        """
        number = self._layout.axis(axis)
        sizes = part_sizes(f"split: axis {self._layout.axis_text(number)}", parts, self.shape[number])
        return list(
            self._kept(
                ("split", number, sizes),
                lambda: [
                    self._new_root(layout, self._backends) for layout in self._known("split").split(number, sizes)
                ],
            )
        )

    def _rows(self, axis: int | str) -> list[Self]:
        """Return all rows along one axis, in the order of the other axes; the caller's row is the slice."""
        number = self._layout.axis(axis)
        layout, name = self._known("_get_all_submeshes"), self._layout.names and (self._layout.names[number],)
        own = self._select([number])

        def make() -> list[Self]:
            others = [1 if other == number else extent for other, extent in enumerate(self.shape)]
            rows = [layout.row(number, place) for place in np.ndindex(*others)]
            mine = self.get_coordinate() is not None
            return [
                own if mine and self.get_rank() in row else self._new_root(Layout(row, name), own._backends)
                for row in rows
            ]

        return list(self._kept(("rows", number), make))

    def _distinct(self, method: str, axes: Sequence[int | str]) -> list[int]:
        if isinstance(axes, (str, int)):
            axes = (axes,)
        numbers = [self._layout.axis(axis) for axis in axes]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(
                f"{method}: pass at least one axis of {self._layout.describe()}, and each once, got {list(axes)}"
            )
        return numbers

    def _name_flattened(self, name: str, axis: Axis, backend: str | None) -> None:
        """Register a flattened axis in the family under its name."""
        root = self._root
        for mesh in (self, root):
            names = mesh._layout.names or ()
            if name in names and mesh._layout.axes[names.index(name)] != axis:
                raise ValueError(
                    f"flatten: {name!r} is the name of another axis of {mesh._layout.describe()}; pass another name"
                )
        if root._flattened.setdefault(name, (axis, backend)) != (axis, backend):
            raise ValueError(
                f"flatten: {name!r} is the name of an axis that was flattened from other axes of"
                f" {root._layout.describe()}, or has another backend; pass another name"
            )

    def _new_root(self, layout: Layout, backends: tuple[str | None, ...]) -> Self:
        """Return the root of a new family, for ranks in an arrangement that this family cannot express."""
        mesh = object.__new__(type(self))
        mesh._store(self._device_type, layout, backends, mesh)
        mesh._bind(self._here())
        mesh._universe = self._root._universe
        mesh._agreement = self._root._agreement
        mesh._topology = self._root._topology
        mesh._plane_known = self._plane_known
        return mesh

    def _kept(self, key: tuple[object, ...], make: Callable[[], list[Self]]) -> list[Self]:
        found = self._others.get(key)
        return self._others.setdefault(key, make()) if found is None else found

    def _known(self, method: str) -> Layout:
        """Return the layout; raise on a rank for which it is only a placeholder."""
        if not self._plane_known:
            why = "meshes derived from a slice exist only on ranks of the mesh"
            raise ValueError(self._outside(f"DeviceMesh.{method}", why))
        return self._layout
