"""DTensor: a NumPy or CuPy array over the ranks of a mesh, with a placement for each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.runtime.plan_cache import remember
from meshdist.system.name_hints import explaining, naming_methods
from meshdist.tensor.agreement import Origin
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.array_methods import ArrayMethods
from meshdist.tensor.array_operators import ArrayOperators
from meshdist.tensor.array_protocols import Absent, ArrayProtocols
from meshdist.tensor.dispatch import implements, method
from meshdist.tensor.moves import gather_to, move
from meshdist.tensor.placements import (
    Placement,
    Placements,
    PlacementsOf,
    placements_in_order,
    placements_text,
)
from meshdist.tensor.redistribution_search import plan

# The layouts that `redistribute` was asked for: by layout, names of axes and placements.
_targets: dict[Any, ArrayLayout] = {}


@naming_methods
class DTensor(ArrayProtocols, ArrayOperators, ArrayMethods):
    """An array over the ranks of a mesh. Each rank holds its block; operations run on the blocks.

    Every axis of the mesh has a placement: `Shard(dim)` splits a dimension into consecutive blocks, `Replicate()`
    repeats the array, and with `Partial(op)` the array is a reduction that is still to be computed. If several axes
    shard one dimension, the first of the mesh splits outermost.

    NumPy's functions and operators take DTensors. Operands that are sharded the same way stay sharded; a replicated one
    is split to match another operand, which sends nothing; a pending reduction is computed where an operation is not
    linear in it. Shardings that do not match raise a PlacementError, which names the `redistribute` to write: blocks
    never move unasked.
    Wrong arguments raise an error on all ranks; errors that depend on the elements, such as a singular matrix, are
    raised only on the ranks that hold these elements.

    `print(x)` shows this rank's block, as NumPy does, below a line about the array: its dtype, shape and placements,
    and the part of it that this rank holds. `repr(x)` says the same in one line, without the block. Neither
    communicates.

    Create DTensors by `distribute_tensor`, `DTensor.from_local`, `DTensor.from_callback`, `zeros`, `ones`, `full`,
    `empty` or `arange`. All ranks of the mesh must create them, and call operations that communicate, in the same
    order.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.tensor import Shard, distribute_tensor
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = distribute_tensor(np.arange(4.0), mesh, {"dp": Shard(0)})
        ...     y = np.sqrt(x) * 2
        ...     return y, y.to_local().tolist(), float(np.sum(x))
        >>> meshdist.run(program, 2)[1]
        (DTensor((4,) float64 as {'dp': Shard(0)}, rank 1 holds [2:4]), [2.8284271247461903, 3.4641016151377544], 6.0)
    """

    __slots__ = ("__weakref__", "_layout", "_local", "_mesh", "_origin")

    _local: Any
    _layout: ArrayLayout
    _mesh: DeviceMesh
    _origin: Origin  # None, except of a pending reduction

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            "DTensor: write distribute_tensor(array, mesh, placements) to distribute a whole array, or"
            " DTensor.from_local(block, mesh, placements) to join the blocks of all ranks; see also zeros, ones, full"
            " and DTensor.from_callback"
        )

    # ---- Making

    @staticmethod
    @explaining
    def from_local(
        local: Any,
        mesh: DeviceMesh,
        placements: Placements | None = None,
        shape: Sequence[int] | None = None,
        run_check: bool = False,
    ) -> DTensor:
        """Return the DTensor whose block on this rank is `local`, without a copy.

        Args:
            local: This rank's block: a NumPy or CuPy array, or an object that converts to one.
            mesh: The mesh; all its ranks call this.
            placements: A list in mesh order, or a dict by axis, in which an axis left out replicates.
            shape: The shape of the whole array, if the placements' sizes follow from it; nothing is sent then. None:
                the ranks exchange the shapes of their blocks, which need not be those of `torch.chunk`.
            run_check: Compare the replicated blocks, which sends as many bytes as the blocks have.

        Raises:
            PlacementError: The blocks do not make an array with these placements.
            TypeError: A Partial whose reduction is not defined for the dtype, such as "avg" for integers.
        """
        made: DTensor = method("from_local")(local, mesh, placements, shape, run_check)
        return made

    @staticmethod
    @explaining
    def from_callback(
        shape: Sequence[int],
        dtype: Any,
        mesh: DeviceMesh,
        placements: Placements | None,
        fn: Callable[[tuple[slice, ...]], Any],
    ) -> DTensor:
        """Return the DTensor whose block on each rank is `fn(index)`; nothing is sent.

        Args:
            shape: The shape of the whole array.
            dtype: Its dtype, to which the blocks are converted.
            mesh: The mesh.
            placements: The placements, as in `distribute_tensor` but without Partial.
            fn: Takes the rank's part of the whole array, a slice for each dimension, and returns the block. It must
                return the same block on all ranks that hold the same part.

        Raises:
            ValueError: A block of a different shape.

        Example:
            >>> import numpy as np, meshdist
            >>> from meshdist.tensor import DTensor, Shard
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            ...     whole = np.arange(3)
            ...     return DTensor.from_callback((3,), int, mesh, {"dp": Shard(0)}, lambda index: whole[index])
            >>> [x.to_local().tolist() for x in meshdist.run(program, 2)]  # doctest: +SKIP
            [[0, 1], [2]]
        """
        made: DTensor = method("from_callback")(shape, dtype, mesh, placements, fn)
        return made

    # ---- Knowing

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self._layout.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._layout.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return cast("np.dtype[Any]", self._local.dtype)

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return int(np.prod(self._layout.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return int(self._local.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return self.size * self.itemsize

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh, by torch's name."""
        return self._mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements in mesh order."""
        return self._layout.placements

    @property
    def layout(self) -> ArrayLayout:
        """Shape, shape of the mesh and placements, as one object; equal layouts are identical."""
        return self._layout

    @property
    def index(self) -> tuple[slice, ...]:
        """The part of the whole array that this rank holds, as a slice for each dimension."""
        return self._layout.index(coordinate_in(self._mesh))

    def to_local(self) -> Any:
        """Return this rank's block, without a copy; of a pending reduction, this rank's part."""
        return self._local

    @explaining
    def full(self, root: int | None = None) -> Any:
        """Return the whole array, as a new one.

        Args:
            root: A rank of the mesh, numbered in row-major order, that gets the array alone; the others get None.
                None: every rank gets it.
        """
        if root is None:
            whole = self._layout.shape
            target = ArrayLayout.of_cuts(whole, self._layout.mesh_shape, (None,) * len(whole), {})
            return self._local.copy() if target is self._layout else self._moved(target)
        if not 0 <= root < self._mesh.size():
            raise ValueError(f"full: root must be a rank of the mesh, 0 to {self._mesh.size() - 1}, got {root}")
        resolved = self._layout.resolved()
        return gather_to(self._moved(resolved), resolved, self._mesh, root)

    def full_tensor(self) -> Any:
        """Return `full()`, by torch's name."""
        return self.full()

    def __repr__(self) -> str:
        described = placements_text(self.placements, self._mesh.mesh_dim_names)
        return f"DTensor({self.shape} {self.dtype} as {described}, {self._held_text()})"

    def __str__(self) -> str:
        described = self._layout.describe(self._mesh.mesh_dim_names)
        return f"{self.dtype} {described}, {self._held_text()}:\n{self._local}"

    def _held_text(self) -> str:
        held = ", ".join(f"{part.start}:{part.stop}" for part in self.index)
        return f"rank {self._mesh.get_rank()} holds {'a part of ' if self._layout.pending else ''}[{held or '...'}]"

    @explaining
    def show(self, form: str | None = None, ax: Any = None) -> Any:
        """Draw which rank holds which part of the array: its blocks, each with the ranks that hold it.

        It does not communicate, so any rank may call it alone. If there are more than two dimensions, it draws slices
        along the last two that are sharded, one for each block of the others; if there are many blocks, only those
        around this rank's are drawn.

        Args:
            form: "text" prints it, "html" returns a string, "plot" draws with matplotlib and returns the Axes. None:
                HTML in a notebook, else printed text.
            ax: The matplotlib Axes for "plot"; all text stays inside them, except for one line of the title. None:
                those of a new figure.

        Example:
            >>> import meshdist
            >>> from meshdist.tensor import Partial, Shard, zeros
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     x = zeros((6, 8), mesh=mesh, placements={"dp": Shard(0), "tp": Shard(1)})
            ...     if mesh.get_rank() == 2:
            ...         x.show()
            >>> _ = meshdist.run(program, 4)
            float64 (6, 8) as {'dp': Shard(0), 'tp': Shard(1)}
            mesh (dp=2, tp=2), rank 2 holds [3:6, 0:4]
            <BLANKLINE>
                 0:4 4:8
             0:3  0   1
             3:6 [2]  3
        """
        return method("show")(self, form, ax)

    def _repr_html_(self) -> str:
        # Notebooks call this.
        html: str = self.show("html")
        return html

    # ---- Moving

    @explaining
    def redistribute(self, placements: Placements | None = None) -> DTensor:
        """Return the array with other placements; itself if they are the same.

        Sharding another dimension takes an all_to_all, and sharding a pending reduction a reduce_scatter; sharding a
        replicated array sends nothing. Over several axes, the cheapest steps are chosen, as docs/tensor.md describes.

        Args:
            placements: The placements, as in `distribute_tensor`. None: every axis replicates.

        Raises:
            PlacementError: The placements do not fit the array, or would change one pending reduction into another.

        Example:
            >>> import numpy as np, meshdist
            >>> from meshdist.tensor import Shard, distribute_tensor
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            ...     x = distribute_tensor(np.arange(4).reshape(2, 2), mesh, {"tp": Shard(0)})
            ...     return x.to_local().tolist(), x.redistribute({"tp": Shard(1)}).to_local().tolist()
            >>> meshdist.run(program, 2)
            [([[0, 1]], [[0], [2]]), ([[2, 3]], [[1], [3]])]
        """
        target = self._target(placements)
        if target is self._layout:
            return self
        if self._origin is None:
            return wrap(move(self._local, self._layout, target, self._mesh), target, self._mesh)
        local = move(self._local, self._layout, target, self._mesh, self._origin)
        return wrap(local, target, self._mesh, self._origin if target.pending else None)

    def _moved(self, target: ArrayLayout) -> Any:
        """Return this rank's block of a different layout of the array; of the same layout, the block itself."""
        return move(self._local, self._layout, target, self._mesh, self._origin)

    @explaining
    def redistribution(self, placements: Placements | None = None) -> str:
        """Return the steps of `redistribute(placements)`, one on each line, without sending anything.

        A line names the collective, the axes, and the bytes that this step sends on the rank that sends most, of all
        ranks of the mesh.
        """
        return plan(self._layout, self._target(placements)).describe(self._mesh.mesh_dim_names, self.itemsize)

    def _target(self, placements: Placements | None) -> ArrayLayout:
        layout, names = self._layout, self._mesh.mesh_dim_names
        listed = type(placements) is list or type(placements) is tuple
        # The types keep True apart from the axis 1; what cannot be hashed is no placement, which is an error below.
        key = (layout, names, *cast(Any, placements)) if listed else None
        target = None
        try:
            if type(placements) is dict:
                key = (layout, names, *map(type, placements), *placements.items())
            target = _targets.get(key)
        except TypeError:
            key = None
        if target is None:
            with PlacementsOf("redistribute"):
                ordered = placements_in_order(placements, layout.mesh_shape, names)
                target = ArrayLayout.of(layout.shape, layout.mesh_shape, ordered)
            if key is not None:
                remember(_targets, key, target)
        return target

    # ---- Parts and copies

    def __copy__(self) -> DTensor:
        return wrap(self._local.copy(), self._layout, self._mesh, self._origin)

    def __deepcopy__(self, memo: Any) -> DTensor:
        return wrap(self._local.copy(), self._layout, self._mesh, self._origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (self._whole("pickling"),)

    def __getitem__(self, key: Any) -> Any:
        return method("__getitem__")(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        method("__setitem__")(self, key, value)


class _Wrap(Protocol):
    def __call__(self, local: Any, layout: ArrayLayout, mesh: DeviceMesh, origin: Origin = None, /) -> DTensor: ...


wrap: _Wrap = DTensor._wrapped


def coordinate_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's coordinate in the mesh.

    Raises:
        ValueError: This rank is outside the mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh, got {type(mesh).__name__}; the array comes first, then the mesh")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is outside the mesh {mesh!r} and holds no part of its arrays; go on only where"
            " mesh.get_coordinate() is not None"
        )
    return coordinate


for _name in dir(np.ndarray):
    if not _name.startswith("_") and not hasattr(DTensor, _name):
        setattr(DTensor, _name, Absent(_name))


implements(np.shape)(lambda a: a.shape)
implements(np.ndim)(lambda a: a.ndim)


@implements(np.size)
def _size(a: DTensor, axis: int | None = None) -> int:
    return a.size if axis is None else a.shape[axis]


@implements(np.result_type)
def _result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    return np.result_type(*[x.dtype if isinstance(x, DTensor) else x for x in arrays_and_dtypes])


implements(np.iscomplexobj)(lambda x: x.dtype.kind == "c")
implements(np.isrealobj)(lambda x: x.dtype.kind != "c")
