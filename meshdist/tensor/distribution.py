"""DTensors from blocks, from a function of the index, and from a whole array on one rank or on all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import numpy as np

from meshdist.arrays.device import cupy_module
from meshdist.arrays.host import AnyArray, as_array, check_dtype
from meshdist.arrays.reduce_op import ReduceOp, check_op_dtype
from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.runtime.context import resolve
from meshdist.system.name_hints import explaining
from meshdist.tensor.agreement import compare, comparing_group
from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.dispatch import implements, refuse_deferring
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.moves import move
from meshdist.tensor.placements import (
    REPLICATE,
    Partial,
    Placement,
    PlacementError,
    Placements,
    PlacementsOf,
    Replicate,
    Shard,
    placements_in_order,
)
from meshdist.tensor.redistribution_steps import relative_to


def array_module(mesh: DeviceMesh) -> Any:
    """Return the module whose arrays the blocks on this mesh are: numpy, or cupy on a mesh of GPUs."""
    if mesh.device_type == "cpu":
        return np
    return cupy_module()


def as_block(array: Any, mesh: DeviceMesh, name: str = "") -> Any:
    """Return `array` as a block on this mesh: in its memory, without a copy where it lies there.

    Messages begin with `name`, which was called with the array.
    """
    module, call = array_module(mesh), f"{name}: " if name else ""
    if isinstance(array, DTensor):
        raise TypeError(
            f"{call}expected an array that is not distributed yet, got a DTensor; write x.redistribute(placements) for"
            " other placements, and x.to_local() for this rank's block"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{call}a masked array cannot be distributed, since its mask would be lost; use its filled(value)"
        )
    if isinstance(array, np.ndarray):
        check_supported(array.dtype, f"{call}array")
    if isinstance(array, module.ndarray):
        return array if type(array) is module.ndarray else module.asarray(array)
    if module is np:
        made = as_array(array, "array") if hasattr(array, "dtype") and np.ndim(array) else np.asarray(array)
        check_supported(made.dtype, f"{call}array")
        return made
    return module.asarray(array)


def check_supported(dtype: np.dtype[Any], what: str) -> None:
    """Raise TypeError for a dtype that arrays over a mesh cannot have: texts, objects, dates, structures."""
    hint = _INSTEAD.get(dtype.kind)
    check_dtype(np.empty(0, dtype), what, None if hint is None else f"; {hint}")


_TEXTS = (
    "encode texts and objects as numbers, for example by np.unique(array, return_inverse=True), or keep a NumPy array"
    " on each rank, which broadcast_object_list and scatter_object_list send"
)
# By the kind of an unsupported dtype: what to do instead.
_INSTEAD = dict.fromkeys("OUST", _TEXTS) | dict.fromkeys("Mm", "pass array.view('int64'), the counts of its unit")
_INSTEAD["V"] = "make an array of each field: array['name']"


def layout_on(name: str, mesh: DeviceMesh, shape: Sequence[int], placements: Placements | None) -> ArrayLayout:
    """Return the layout of an array of this shape on `mesh`, which the function `name` makes."""
    with PlacementsOf(name):
        layout = ArrayLayout.of(shape, mesh.shape, placements_in_order(placements, mesh.shape, mesh.mesh_dim_names))
    return _compared(name, layout, mesh)


def _compared(name: str, layout: ArrayLayout, mesh: DeviceMesh) -> ArrayLayout:
    """Return the layout of an array that is made without messages; with the debug level DETAIL, compare the ranks'.

    Raises:
        DistBackendError: A rank makes another array, or another call; on all ranks.
    """
    group = comparing_group(mesh)
    if group is not None:
        compare(group, name, layout.describe(mesh.mesh_dim_names))
    return layout


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape, given as an integer or integers, as a tuple.

    Raises:
        TypeError: No integers.
        ValueError: Negative ones.
    """
    if isinstance(shape, bool):
        raise TypeError(f"a shape must be an integer or a sequence of integers, got {shape!r}")
    rows = tuple(map(operator.index, (shape,) if np.ndim(shape) == 0 else shape))
    if min(rows, default=0) < 0:
        raise ValueError(f"negative dimensions are not allowed, got the shape {rows}")
    return rows


@explaining
def distribute_tensor(
    array: AnyArray, mesh: DeviceMesh, placements: Placements | None = None, src_data_rank: int | None = 0
) -> DTensor:
    """Return `array` as a DTensor.

    Args:
        array: The whole array: a NumPy or CuPy array, or an object that converts to one. With a `src_data_rank`, the
            other ranks may pass None, or an array of the same shape and dtype, whose values are ignored.
        mesh: The mesh; all its ranks call this.
        placements: A Shard, Replicate or Partial for each axis: a list in mesh order, or a dict by axis, in which an
            axis left out replicates. None: every axis replicates. For a Partial sum, the first rank along the axis
            holds the array and the others hold zeros.
        src_data_rank: The rank of the mesh, in row-major order, that has the array and sends each rank its block. None:
            every rank has the whole array and takes its own block; nothing is sent.

    Raises:
        PlacementError: The placements do not fit the array.
        TypeError: A Partial whose reduction is not defined for the dtype, such as "avg" for integers.
        ValueError: The shapes or dtypes on the ranks differ.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.tensor import Shard, distribute_tensor
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     whole = np.arange(3) if mesh.get_rank() == 0 else None
        ...     return distribute_tensor(whole, mesh, {"dp": Shard(0)}).to_local().tolist()
        >>> meshdist.run(program, 2)
        [[0, 1], [2]]
    """
    refuse_deferring("distribute_tensor", array)
    coordinate_in(mesh)
    size = mesh.size()
    if src_data_rank is not None and not 0 <= src_data_rank < size:
        raise ValueError(
            f"distribute_tensor: src_data_rank must be a rank of the mesh, 0 to {size - 1}, got {src_data_rank}"
        )
    with PlacementsOf("distribute_tensor"):
        ordered = placements_in_order(placements, mesh.shape, mesh.mesh_dim_names)
    if src_data_rank is None or size == 1:
        whole = as_block(array, mesh, "distribute_tensor")
    else:
        given = None if array is None else as_block(array, mesh, "distribute_tensor")
        shape, dtype = _agreed(given, ordered, mesh, src_data_rank)
        with PlacementsOf("distribute_tensor"):
            layout = ArrayLayout.of(shape, mesh.shape, ordered)
        scattered = ArrayLayout.of(shape, mesh.shape, [p if isinstance(p, Shard) else REPLICATE for p in ordered])
        _check_pending("distribute_tensor", layout, dtype)
        block = _scattered(given, scattered, dtype, mesh, src_data_rank)
        return wrap(block if layout is scattered else move(block, scattered, layout, mesh), layout, mesh)
    layout = layout_on("distribute_tensor", mesh, whole.shape, ordered)
    _check_pending("distribute_tensor", layout, whole.dtype)
    replicated = ArrayLayout.of_cuts(whole.shape, mesh.shape, (None,) * whole.ndim, {})
    if layout is replicated:
        return wrap(whole.copy(), layout, mesh)
    return wrap(move(whole, replicated, layout, mesh), layout, mesh)


def _check_pending(name: str, layout: ArrayLayout, dtype: np.dtype[Any]) -> None:
    """Raise TypeError where a pending reduction is not defined for the dtype."""
    for op in layout.pending.values():
        try:
            check_op_dtype(ReduceOp(op), dtype)
        except TypeError as error:
            raise TypeError(f"{name}: {Partial(op)}: {error}") from None


def _agreed(
    given: Any, placements: tuple[Placement, ...], mesh: DeviceMesh, src: int
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of the source's array; raise on all ranks where those of another rank differ."""
    mine = None if given is None else (tuple(given.shape), given.dtype)
    reported = _told_by_all("distribute_tensor", mesh, (mine, placements))
    described, wanted = reported[src]
    if described is None:
        raise ValueError(
            f"distribute_tensor: rank {src} of the mesh is the source and passed None; pass the array there"
        )
    for rank, (other, other_placements) in enumerate(reported):
        if other_placements != wanted:
            raise PlacementError(
                f"distribute_tensor: rank {rank} of the mesh passed the placements {list(other_placements)}, and rank"
                f" {src} {list(wanted)}; all ranks must pass the same"
            )
        if other is not None and other != described:
            raise ValueError(
                f"distribute_tensor: rank {rank} of the mesh passed an array of shape {other[0]} and dtype"
                f" {other[1]}, and rank {src}, the source, of shape {described[0]} and dtype"
                f" {described[1]}; pass the same, or None"
            )
    shape, dtype = described
    return shape, dtype


def _told_by_all(name: str, mesh: DeviceMesh, mine: Any) -> list[Any]:
    """Return what each rank of the mesh passes as `mine`, in a call of the function `name`."""
    group = resolve(mesh)
    assert isinstance(group, ProcessGroup)
    reported: list[Any] = [None] * mesh.size()
    with group.hooks.comparing(f"in {name}"):
        group.all_gather_object(reported, mine)
    return reported


def _scattered(whole: Any, layout: ArrayLayout, dtype: np.dtype[Any], mesh: DeviceMesh, src: int) -> Any:
    """Return this rank's block of the array of the rank `src`.

    The array goes along one axis after the other, split or repeated, to the ranks that differ from the source in these
    axes alone: a rank sends what replicates once along each axis.
    """
    coordinate = coordinate_in(mesh)
    source = tuple(int(at) for at in np.unravel_index(src, mesh.shape))
    module = array_module(mesh)
    done: list[Placement] = [REPLICATE] * mesh.ndim
    block = np.ascontiguousarray(whole) if coordinate == source and module is np else whole
    for axis, placement in enumerate(layout.placements):
        before = ArrayLayout.of(layout.shape, mesh.shape, done)
        done[axis] = placement
        after = ArrayLayout.of(layout.shape, mesh.shape, done)
        group = mesh.get_group(axis)
        if coordinate[axis + 1 :] != source[axis + 1 :] or mesh.shape[axis] == 1:
            continue
        is_source = coordinate[axis] == source[axis]
        mine = module.empty(after.local_shape(coordinate), dtype)
        if isinstance(placement, Shard):
            here = before.index(coordinate)
            places = [(*coordinate[:axis], place, *coordinate[axis + 1 :]) for place in range(mesh.shape[axis])]
            sent = [block[relative_to(after.index(place), here)] for place in places] if is_source else []
            none = module.empty((0,), dtype)
            group.all_to_all(
                [mine if place == source[axis] else none for place in range(mesh.shape[axis])],
                sent or [none] * mesh.shape[axis],
            )
        else:
            if is_source:
                mine[...] = block
            group.broadcast(mine, source[axis])
        block = mine
    return block.copy() if block is whole else block


@implements("from_local")
def from_local(
    local: Any,
    mesh: DeviceMesh,
    placements: Placements | None,
    shape: Sequence[int] | None,
    run_check: bool,
    name: str = "DTensor.from_local",
) -> DTensor:
    refuse_deferring(name, local)
    coordinate = coordinate_in(mesh)
    block = as_block(local, mesh, name)
    if shape is None:
        with PlacementsOf(name):
            ordered = placements_in_order(placements, mesh.shape, mesh.mesh_dim_names)
        reported = _told_by_all(name, mesh, (block.shape, block.dtype.str, ordered))
        layout = _layout_of_blocks(name, reported, mesh)
    else:
        layout = layout_on(name, mesh, checked_shape(shape), placements)
        if layout.local_shape(coordinate) != block.shape:
            raise PlacementError(
                f"{name}: the block at {coordinate} of an array of"
                f" {layout.describe(mesh.mesh_dim_names)} must have shape {layout.local_shape(coordinate)}, got"
                f" {block.shape}; pass the sizes of the blocks, or leave out shape= to have the ranks tell them"
            )
    _check_pending(name, layout, block.dtype)
    if run_check:
        _check_replicas(name, block, layout, mesh)
    return wrap(block, layout, mesh)


def _layout_of_blocks(name: str, reported: list[Any], mesh: DeviceMesh) -> ArrayLayout:
    """Return the layout of an array whose blocks have the reported shapes, by rank of the mesh."""
    first_shape, first_dtype, placements = reported[0]
    for rank, (shape, dtype, others) in enumerate(reported):
        if len(shape) != len(first_shape) or dtype != first_dtype or others != placements:
            raise PlacementError(
                f"{name}: rank {rank} of the mesh passed a block of shape {shape}, dtype {np.dtype(dtype)}"
                f" and placements {list(others)}, and rank 0 of shape {first_shape}, dtype {np.dtype(first_dtype)} and"
                f" placements {list(placements)}; dtypes, placements and the number of dimensions must be the same"
            )
    dims = len(first_shape)
    axes: list[list[int]] = [[] for _ in range(dims)]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            if not -dims <= placement.dim < dims:
                raise PlacementError(
                    f"{name}: {placement} shards a dimension that blocks of {dims} dimensions do not have"
                )
            axes[placement.dim % dims].append(axis)
    rows = np.array([shape for shape, _, _ in reported], dtype=np.int64).reshape(*mesh.shape, dims)
    cuts = []
    for dim in range(dims):
        others = tuple(axis for axis in range(mesh.ndim) if axis not in axes[dim])
        sizes = rows[..., dim]
        least, most = sizes.min(axis=others), sizes.max(axis=others)
        if not np.array_equal(least, most):
            raise PlacementError(
                f"{name}: along axes that do not shard dimension {dim}, blocks must have the same number of"
                f" rows in it, got shapes {sorted({shape for shape, _, _ in reported})} with placements"
                f" {list(placements)}"
            )
        cuts.append(Cut(tuple(axes[dim]), tuple(map(int, least.reshape(-1)))) if axes[dim] else None)
    shape = [reported[0][0][dim] if cut is None else sum(cut.sizes) for dim, cut in enumerate(cuts)]
    pending = {axis: placement.op for axis, placement in enumerate(placements) if isinstance(placement, Partial)}
    layout = ArrayLayout.of_cuts(shape, mesh.shape, cuts, pending)
    explicit = any(isinstance(placement, Shard) and placement.sizes is not None for placement in placements)
    if explicit:
        with PlacementsOf(name):
            given = layout_on(name, mesh, tuple(shape), placements)
        if given is not layout:
            raise PlacementError(
                f"{name}: the blocks make {layout.describe(mesh.mesh_dim_names)}, and the placements are"
                f" {list(placements)}"
            )
    return layout


def _check_replicas(name: str, block: Any, layout: ArrayLayout, mesh: DeviceMesh) -> None:
    """Raise on all ranks if blocks that should be the same are not."""
    same, mine = True, _bytes(block)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Replicate) and mesh.shape[axis] > 1:
            first = block.copy(order="C")
            mesh.get_group(axis).broadcast(first, 0)
            same = same and bool((_bytes(first) == mine).all())
    reported = _told_by_all(name, mesh, same)
    if not all(reported):
        raise ValueError(
            f"{name}: rank {reported.index(False)} of the mesh holds other values than the first rank along"
            f" an axis that replicates, in {layout.describe(mesh.mesh_dim_names)}"
        )


def _bytes(block: Any) -> Any:
    return block.reshape(-1).view(np.uint8)


@implements("from_callback")
def from_callback(
    shape: Sequence[int],
    dtype: Any,
    mesh: DeviceMesh,
    placements: Placements | None,
    fn: Callable[[tuple[slice, ...]], Any],
) -> DTensor:
    layout = layout_on("DTensor.from_callback", mesh, checked_shape(shape), placements)
    if layout.pending:
        raise PlacementError(f"DTensor.from_callback: placements must not be Partial, got {list(layout.placements)}")
    index = layout.index(coordinate_in(mesh))
    wanted = layout.local_shape(coordinate_in(mesh))
    block = array_module(mesh).asarray(as_block(fn(index), mesh, "DTensor.from_callback"), dtype)
    if block.shape != wanted:
        raise ValueError(
            f"DTensor.from_callback: fn({index}) must return an array of shape {wanted}, got {block.shape}"
        )
    return wrap(block, layout, mesh)


class Memory:
    """A dict for each mesh, as long as the mesh lives; by identity, since ranks that are threads have equal meshes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[DeviceMesh], dict[Any, Any]]] = {}

    def on(self, mesh: DeviceMesh) -> dict[Any, Any]:
        at = id(mesh)
        found = self._known.get(at)
        if found is None or found[0]() is not mesh:
            found = self._known[at] = (ref(mesh, lambda _: self._known.pop(at, None)), {})
        return found[1]


@implements("on_device")
def on_device(array: DTensor, device_type: str) -> DTensor:
    """Return `array` with its blocks in the memory of "cpu" or "cuda", on a mesh of the same ranks.

    All ranks of the world call it, the first time for a mesh.
    """
    mesh, local = array.mesh, array.to_local()
    if mesh.device_type == device_type:
        return array
    block = cupy_module().asarray(local) if device_type == "cuda" else np.asarray(local.get())
    # Meshes that keep each other are freed together, which they would not be in a dict that keeps one of them.
    twins = vars(mesh).setdefault("_twins", {})
    if device_type not in twins:
        twin = twins[device_type] = DeviceMesh(device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        vars(twin)["_twins"] = {mesh.device_type: mesh}
    return wrap(block, array.layout, twins[device_type])
