"""The gradients of a backward pass: brought to the placements of what they are the gradients of, and added together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from autograd.tracer import getval, isbox

from meshdist import functional
from meshdist.arrays.trees import Tree
from meshdist.autograd.collectives import check_gradient
from meshdist.collectives.objects import all_gather_object
from meshdist.debug.debug_level import DebugLevel, get_debug_level
from meshdist.debug.replicated import check_replicated
from meshdist.errors import DistBackendError
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.moves import group_of

Place = tuple[int, int]


class PendingGradients:
    """Gradients as they become complete. Sums along the same axes of a mesh are computed by one call."""

    def __init__(self) -> None:
        self._done: dict[Place, Any] = {}
        # By mesh and axes: the gradients whose blocks are to be added along these axes, and nothing else.
        self._sums: dict[tuple[int, tuple[int, ...]], dict[Place, DTensor]] = {}
        self._names: dict[Place, str] = {}

    def add(self, place: Place, of: Any, name: str, gradient: Any) -> None:
        """Take the complete gradient of the array `of`, which messages call `name`.

        Raises:
            ValueError: A gradient of another shape.
            TypeError: A gradient of another kind of dtype.
            DistBackendError: With the debug level DETAIL: ranks that hold the same have different gradients.
        """
        check_gradient(f"grad: {name}", gradient, of)
        if isbox(gradient):
            self._done[place] = gradient.full() if hasattr(gradient, "full") and not _placed(of) else gradient
            return
        if isinstance(gradient, DTensor):
            target = getval(of).layout.resolved() if _placed(of) else gradient.layout.uncut(range(gradient.ndim))
            self._take(place, name, gradient, target if _placed(of) else target.resolved(), _placed(of))
        else:
            self._done[place] = _cast(gradient, of)

    def _take(self, place: Place, name: str, gradient: DTensor, target: ArrayLayout, placed: bool) -> None:
        self._names[place] = name
        layout = gradient.layout
        axes = tuple(axis for axis in layout.pending if gradient.mesh.shape[axis] > 1)
        _check_equal(gradient, name)
        if layout.pending and layout.resolved() is target and set(layout.pending.values()) == {"sum"} and axes:
            self._sums.setdefault((id(gradient.mesh), axes), {})[place] = gradient
        else:
            gradient = gradient.redistribute(target.placements)
        self._done[place] = gradient if placed else _Whole(gradient)

    def resolve(self) -> dict[Place, Any]:
        """Compute what is pending, and return all gradients."""
        for (_, axes), gradients in self._sums.items():
            mesh = next(iter(gradients.values())).mesh
            blocks = {f"{self._names[place]} {place}": g.to_local() for place, g in gradients.items()}
            sums = functional.all_reduce(blocks, "sum", group_of(mesh, axes))
            for place, g in gradients.items():
                total = wrap(sums[f"{self._names[place]} {place}"], g.layout.resolved(), mesh)
                self._done[place] = _Whole(total) if isinstance(self._done[place], _Whole) else total
        return {place: g.array.full() if isinstance(g, _Whole) else g for place, g in self._done.items()}


class _Whole:
    """The gradient of a plain array."""

    def __init__(self, array: DTensor) -> None:
        self.array = array


def _placed(of: Any) -> bool:
    return isinstance(getval(of), DTensor)


def _cast(gradient: Any, of: Any) -> Any:
    dtype = of.dtype
    return gradient if np.asarray(gradient).dtype == dtype else np.asarray(gradient).astype(dtype)


def _check_equal(gradient: DTensor, name: str) -> None:
    """With the debug level DETAIL, compare the blocks of ranks that hold the same part of a gradient."""
    if get_debug_level() is not DebugLevel.DETAIL:
        return
    layout, mesh = gradient.layout, gradient.mesh
    busy = {axis for cut in layout.cuts if cut is not None for axis in cut.axes} | layout.pending.keys()
    axes = tuple(axis for axis in range(len(mesh.shape)) if axis not in busy and mesh.shape[axis] > 1)
    if axes:
        check_replicated(
            np.asarray(gradient.to_local()),
            group_of(mesh, axes),
            f"the gradient of {name} (it replicates along these ranks: a sum over them is missing)",
        )


def check_same_trees(trees: Sequence[Tree], seen: set[str]) -> None:
    """Check once for each structure that all ranks of a mesh differentiate by DTensors of the same names and shapes.

    Raises:
        DistBackendError: They do not; on all ranks.
    """
    placed = [
        (name, leaf) for tree in trees for name, leaf in zip(tree.names, tree.leaves, strict=True)
        if isinstance(leaf, DTensor)
    ]  # fmt: skip
    meshes: list[DeviceMesh] = []
    for _, leaf in placed:
        if not any(leaf.mesh is mesh for mesh in meshes):
            meshes.append(leaf.mesh)
    for mesh in meshes:
        described = ", ".join(
            f"{name}: {leaf.dtype} {leaf.layout.describe(mesh.mesh_dim_names)}" for name, leaf in placed
            if leaf.mesh is mesh
        )  # fmt: skip
        if described in seen or mesh.size() == 1:
            continue
        group = group_of(mesh, tuple(range(mesh.ndim)))
        found: list[Any] = [None] * group.size()
        all_gather_object(found, described, group)
        others = [rank for rank, text in enumerate(found) if text != found[0]]
        if others:
            raise DistBackendError(
                f"{group.error_prefix('grad')}: all ranks must differentiate by the same DTensors: rank 0 has"
                f" {found[0]}; rank {others[0]} has {found[others[0]]}"
            )
        seen.add(described)
