"""The gradients of a backward pass: brought to the placements of what they are the gradients of, and added together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from autograd.tracer import isbox

from meshdist.arrays.host import consecutive_views
from meshdist.arrays.trees import Tree
from meshdist.autograd.collective_primitives import check_gradient
from meshdist.autograd.device_arrays import as_any_array
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.objects import all_gather_object
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from meshdist.debug.debug_level import DebugLevel, get_debug_level
from meshdist.debug.replicated import check_replicated
from meshdist.errors import DistBackendError
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.distribution import Memory, array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.moves import group_of

Place = tuple[int, int]

BUCKET_BYTES = 25 << 20  # as torch's DistributedDataParallel


class PendingGradients:
    """Gradients as they become complete.

    Sums along the same axes of a mesh are computed together, in buckets: a full bucket is started at once, and is under
    way while the backward pass goes on.
    """

    def __init__(self) -> None:
        self._done: dict[Place, Any] = {}
        self._whole: set[Place] = set()  # the gradients of plain arrays
        self._open: dict[Any, _Bucket] = {}
        self._started: list[_Bucket] = []
        self._blocks: set[int] = set()

    def add(self, place: Place, of: Any, name: str, gradient: Any) -> None:
        """Take the complete gradient of the array `of`, which messages call `name`.

        Raises:
            ValueError: A gradient of a different shape.
            TypeError: A gradient of a different kind of dtype.
            DistBackendError: With the debug level DETAIL: ranks that hold the same have different gradients.
        """
        check_gradient("grad", gradient, of, name)
        if isbox(gradient):
            if _is_placed(gradient) and not _is_placed(of):
                gradient = gradient.full()
            elif _is_placed(gradient):
                gradient = gradient.redistribute(of.layout.resolved().placements)
            self._done[place] = gradient
        elif isinstance(gradient, DTensor):
            self._add_placed(place, of, name, gradient)
        else:
            gradient = gradient if hasattr(gradient, "dtype") else np.asarray(gradient)
            self._done[place] = self._own(gradient if gradient.dtype == of.dtype else gradient.astype(of.dtype))

    def _add_placed(self, place: Place, of: Any, name: str, gradient: DTensor) -> None:
        if gradient.dtype != of.dtype:
            gradient = gradient.astype(of.dtype)
        _check_equal(gradient, name)
        layout = gradient.layout
        if _is_placed(of):
            target = of.layout.resolved()
        else:
            self._whole.add(place)
            target = layout.uncut(range(layout.ndim)).resolved()
        kind = _bucket_of(layout, target, gradient.mesh.shape)
        if kind is not None:
            self._add_to_bucket(place, gradient, target, kind)
        else:
            gradient = gradient.redistribute(target.placements)
            self._done[place] = wrap(self._own(gradient.to_local()), gradient.layout, gradient.mesh)

    def _own(self, block: Any) -> Any:
        """Return a block that may be written into, and is no other gradient's."""
        is_shared = not block.flags.writeable if isinstance(block, np.ndarray) else 0 in block.strides
        if is_shared or id(block) in self._blocks:
            block = block.copy()
        self._blocks.add(id(block))
        return block

    def _add_to_bucket(self, place: Place, gradient: DTensor, target: ArrayLayout, kind: type[_Bucket]) -> None:
        axes = tuple(axis for axis in gradient.layout.pending if gradient.mesh.shape[axis] > 1)
        key = (id(gradient.mesh), axes, gradient.dtype, kind)
        bucket = self._open.get(key)
        if bucket is None:
            bucket = self._open[key] = kind(gradient.mesh, axes)
        bucket.add(place, gradient, target)
        if bucket.nbytes >= BUCKET_BYTES:
            self._start(key, async_op=True)

    def _start(self, key: Any, async_op: bool) -> None:
        bucket = self._open.pop(key)
        bucket.start(async_op)
        self._started.append(bucket)

    def resolve(self) -> dict[Place, Any]:
        """Compute what is pending, and return all gradients."""
        several = len(self._open) > 1
        for key in list(self._open):
            self._start(key, async_op=several)
        for bucket in self._started:
            self._done.update(bucket.wait())
        return {
            place: gradient.to_local() if place in self._whole else gradient for place, gradient in self._done.items()
        }


class _Bucket:
    """Gradients of one dtype whose blocks are to be added along the same axes: one all_reduce."""

    def __init__(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> None:
        self._mesh = mesh
        self._axes = axes
        self._group = group_of(mesh, axes)
        self._gradients: dict[Place, tuple[DTensor, ArrayLayout]] = {}
        self.nbytes = 0

    def add(self, place: Place, gradient: DTensor, target: ArrayLayout) -> None:
        self._gradients[place] = gradient, target
        self.nbytes += gradient.to_local().nbytes

    def start(self, async_op: bool) -> None:
        self._flat = self._joined([gradient.to_local() for gradient, _ in self._gradients.values()])
        self._work = all_reduce(self._flat, "sum", self._group, async_op=async_op)
        self._is_async = async_op

    def wait(self) -> dict[Place, DTensor]:
        """Return the sums, which are views of the bucket."""
        if self._is_async:
            self._work.wait()
        coordinate = coordinate_in(self._mesh)
        targets = {place: target for place, (_, target) in self._gradients.items()}
        views = consecutive_views(self._flat, (target.local_shape(coordinate) for target in targets.values()))
        pairs = zip(targets.items(), views, strict=True)
        return {place: wrap(view, target, self._mesh) for (place, target), view in pairs}

    def _joined(self, blocks: Sequence[Any]) -> Any:
        module = array_module(self._mesh)
        return module.concatenate([module.ravel(block) for block in blocks])


class _ScatterBucket(_Bucket):
    """Gradients whose blocks are to be added along one axis, which then cuts them further: one reduce_scatter."""

    def start(self, async_op: bool) -> None:
        rows = [self._joined(self._blocks_for(rank)) for rank in range(self._group.size())]
        length = max(row.size for row in rows)
        sent = array_module(self._mesh).zeros((len(rows), length), rows[0].dtype)
        for number, row in enumerate(rows):
            sent[number, : row.size] = row
        self._flat = array_module(self._mesh).empty(length, sent.dtype)
        self._work = reduce_scatter_tensor(self._flat, sent, "sum", self._group, async_op=async_op)
        self._is_async = async_op

    def _blocks_for(self, rank: int) -> list[Any]:
        """Return what the rank of this number along the axis is to have of the gradients."""
        here = coordinate_in(self._mesh)
        there = tuple(rank if axis in self._axes else place for axis, place in enumerate(here))
        blocks = []
        for gradient, target in self._gradients.values():
            pairs = zip(gradient.layout.index(here), target.index(there), strict=True)
            blocks.append(gradient.to_local()[tuple(slice(b.start - a.start, b.stop - a.start) for a, b in pairs)])
        return blocks


def _bucket_of(layout: ArrayLayout, target: ArrayLayout, mesh_shape: Sequence[int]) -> type[_Bucket] | None:
    """Return the kind of bucket that brings gradients from one layout to another; None where that takes more."""
    axes = {axis for axis in layout.pending if mesh_shape[axis] > 1}
    if not axes or set(layout.pending.values()) != {"sum"}:
        return None
    if layout.resolved() is target:
        return _Bucket
    pairs = list(zip(layout.cuts, target.cuts, strict=True))
    finer = all(a is None or (b is not None and a.is_within(b, layout.mesh_shape)) for a, b in pairs)
    added = {axis for a, b in pairs if b is not None for axis in b.axes if a is None or axis not in a.axes}
    return _ScatterBucket if finer and len(axes) == 1 and added == axes else None


def _is_placed(x: Any) -> bool:
    return hasattr(x, "placements")


def _check_equal(gradient: DTensor, name: str) -> None:
    """With the debug level DETAIL, compare the blocks of ranks that hold the same part of a gradient."""
    if get_debug_level() is not DebugLevel.DETAIL:
        return
    layout, mesh = gradient.layout, gradient.mesh
    busy = {axis for cut in layout.cuts if cut is not None for axis in cut.axes} | layout.pending.keys()
    axes = tuple(axis for axis in range(len(mesh.shape)) if axis not in busy and mesh.shape[axis] > 1)
    if axes:
        check_replicated(
            as_any_array(gradient.to_local()),
            group_of(mesh, axes),
            f"the gradient of {name} (it replicates along these ranks: a sum over them is missing)",
        )


# By mesh: what all ranks were found to differentiate by.
_compared = Memory()


def check_same_trees(trees: Sequence[Tree]) -> None:
    """Check, once for each, that all ranks of a mesh differentiate by DTensors of the same names and layouts.

    Raises:
        DistBackendError: They do not; on all ranks.
    """
    of_mesh: dict[int, list[tuple[str, DTensor]]] = {}
    for tree in trees:
        for name, leaf in zip(tree.names, tree.leaves, strict=True):
            if isinstance(leaf, DTensor):
                of_mesh.setdefault(id(leaf.mesh), []).append((name, leaf))
    for leaves in of_mesh.values():
        mesh = leaves[0][1].mesh
        key = tuple((name, leaf.layout, leaf.dtype) for name, leaf in leaves)
        compared = _compared.on(mesh)
        if key not in compared and mesh.size() > 1:
            _compare(leaves, mesh)
            compared[key] = True


def _compare(leaves: Sequence[tuple[str, DTensor]], mesh: DeviceMesh) -> None:
    group = group_of(mesh, tuple(range(mesh.ndim)))
    names = mesh.mesh_dim_names
    found: list[Any] = [None] * group.size()
    described = [f"{name}: {leaf.dtype} {leaf.layout.describe(names)}" for name, leaf in leaves]
    all_gather_object(found, ", ".join(described), group)
    others = [rank for rank, text in enumerate(found) if text != found[0]]
    if others:
        raise DistBackendError(
            f"{group.error_prefix('grad')}: all ranks must differentiate with respect to the same DTensors: rank 0"
            f" has {found[0]}; rank {others[0]} has {found[others[0]]}"
        )
