"""MeshArrangements: the same ranks along other axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshdist.mesh.axis_backends import BackendChoice, axis_backends, shared_backend
from meshdist.mesh.layout import Layout
from meshdist.mesh.mesh_slices import MeshSlices
from meshdist.mesh.sizes import checked_sizes, part_sizes
from meshdist.mesh.strides import Axis, joined

if TYPE_CHECKING:
    from typing_extensions import Self


class MeshArrangements(MeshSlices):
    """Arrange the ranks of a mesh anew. Nothing is sent; groups that are known are used again.

    Example:
        >>> import meshdist
        >>> issubclass(meshdist.DeviceMesh, MeshArrangements)
        True
    """

    def flatten(
        self,
        name: str | None = None,
        backend_override: BackendChoice | None = None,
        *,
        axes: Sequence[int | str] | None = None,
    ) -> Self:
        """Return this mesh with all its axes, or some of them, as one; the same object each time.

        The last of the axes counts fastest. They need not be neighbours: `mesh["pp", "tp"].flatten()` is the calling
        rank's plane over both as one row. The new axis is found by its name from the meshes that it lies inside, as
        `mesh["pp_tp"]`.

        Args:
            name: Of the new axis; those of its axes with "_" between them where None.
            backend_override: The backend of the new axis; that of its axes where they have the same, else the world's.
            axes: The axes to flatten, by name or index, in the order in which they count; the others stay, and the new
                one comes in the place of the first named. All, into a mesh of one axis, where None.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
            ValueError: An axis is given twice, or the name is that of another axis.

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

    def unflatten(
        self,
        axis: int | str,
        sizes: Sequence[int],
        names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, BackendChoice] | None = None,
    ) -> Self:
        """Return this mesh with one axis as several, the last of them fastest; the same object each time.

        Args:
            axis: The axis, by name or index. Its place is that of the new ones.
            sizes: The number of ranks along each new axis; the product is that of `axis`.
            names: One per new axis, where this mesh has names.
            backend_override: New axis, by name or by index among the new ones, to backend; that of `axis` where None.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
            ValueError: The product is another, a size is below 1, or the names do not fit.
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
        """Return this mesh with its axes in another order; the same object each time.

        Args:
            axes: All axes, by name or index, in their new order; the reverse of the present one where none are given.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
            ValueError: An axis is given twice, or is missing.

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
                f"transpose: name all {self.ndim} axes of {self._layout.describe()}, got {list(order)}; to leave some"
                " out, take a slice"
            )
        return self._select(numbers)

    def split(self, axis: int | str, parts: int | Sequence[int]) -> list[Self]:
        """Return the parts of this mesh along one axis, in order; the same meshes each time.

        A rank is in one of the parts and outside the others, where `get_coordinate()` is None. Each has the axes of
        this mesh, with fewer ranks along `axis`.

        Args:
            axis: The axis, by name or index.
            parts: Into how many parts of equal size, or the number of places along the axis of each part.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
            ValueError: The parts do not make up the axis; or this is a slice, and the caller outside the mesh.
            TypeError: They are not integers.

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
        """Return every row along one axis, in the order of the other axes; the calling rank's is the slice."""
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
                f"{method}: give at least one axis of {self._layout.describe()}, and each once, got {list(axes)}"
            )
        return numbers

    def _name_flattened(self, name: str, axis: Axis, backend: str | None) -> None:
        """Have the family find a flattened axis by its name."""
        root = self._root
        for mesh in (self, root):
            names = mesh._layout.names or ()
            if name in names and mesh._layout.axes[names.index(name)] != axis:
                raise ValueError(
                    f"flatten: {name!r} is the name of another axis of {mesh._layout.describe()}; give another name"
                )
        if root._flattened.setdefault(name, (axis, backend)) != (axis, backend):
            raise ValueError(
                f"flatten: {name!r} is the name of an axis that was flattened from other axes of"
                f" {root._layout.describe()}, or has another backend; give another name"
            )

    def _new_root(self, layout: Layout, backends: tuple[str | None, ...]) -> Self:
        """Return the root of a new family, for ranks that are not arranged as those of this mesh's."""
        mesh = object.__new__(type(self))
        mesh._store(self._device_type, layout, backends, mesh)
        mesh._bind(self._here())
        mesh._universe = self._root._universe
        mesh._agreement = self._root._agreement
        mesh._plane_known = self._plane_known
        return mesh

    def _kept(self, key: tuple[object, ...], make: Callable[[], list[Self]]) -> list[Self]:
        found = self._others.get(key)
        return self._others.setdefault(key, make()) if found is None else found

    def _known(self, method: str) -> Layout:
        """Return the layout, where it is not but a stand-in on a rank that has no row or plane."""
        if not self._plane_known:
            why = "what is derived from a slice holds the calling rank's row, and this rank has none"
            raise ValueError(self._outside(f"DeviceMesh.{method}", why))
        return self._layout
