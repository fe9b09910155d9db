"""Concatenate meshes: join their axes, or append their ranks along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from meshdist.mesh.layout.layout import Layout
from meshdist.mesh.mesh_slices import MeshSlices

M = TypeVar("M", bound=MeshSlices)


def concatenated_axes(meshes: Sequence[M]) -> M:
    """Return the mesh with the axes of all `meshes`, in this order, that contains the calling rank."""
    first = meshes[0]
    strangers = [mesh for mesh in meshes if mesh._root is not first._root]
    if strangers:
        raise ValueError(
            f"concatenate: meshes must be slices of one mesh, and {first!r} is of another than {strangers[0]!r}; give"
            " axis= to put meshes one after the other"
        )
    layouts = [mesh._layout for mesh in meshes]
    names = tuple(name for layout in layouts for name in layout.names or ())
    axes = tuple(axis for layout in layouts for axis in layout.axes)
    if names and any(layout.names is None for layout in layouts):
        raise ValueError("concatenate: some of the meshes have axis names, and some none; give all of them names")
    if len(set(names)) < len(names):
        raise ValueError(f"concatenate: every name may be used once, got the axes {', '.join(map(repr, names))}")
    if not first._root._layout.holds(axes):
        described = " and ".join(layout.describe() for layout in layouts)
        raise ValueError(f"concatenate: the axes of {described} overlap, so that ranks would be in the mesh twice")
    return first._over(axes, names or None, tuple(backend for mesh in meshes for backend in mesh._backends))


def concatenated_ranks(meshes: Sequence[M], axis: int | str) -> M:
    """Return the mesh that appends the ranks of `meshes` along one axis; the same object each time."""
    first = meshes[0]
    number = first._layout.axis(axis)
    for mesh in meshes:
        _check_alike(mesh, first)

    def make() -> list[M]:
        layout = Layout.concatenate([mesh._known("concatenate") for mesh in meshes], number)
        return [first._new_root(layout, first._backends), *meshes]  # keeps the meshes alive: their ids are the key

    return first._kept(("concatenate", number, *map(id, meshes)), make)[0]


def _check_alike(mesh: MeshSlices, first: MeshSlices) -> None:
    if (mesh.ndim, mesh.mesh_dim_names) != (first.ndim, first.mesh_dim_names):
        raise ValueError(
            f"concatenate: meshes must have the same axes, got {first._layout.describe()} and {mesh._layout.describe()}"
        )
    for what, given, wanted in (
        ("device type", mesh.device_type, first.device_type),
        ("backends", mesh._backends, first._backends),
    ):
        if given != wanted:
            raise ValueError(f"concatenate: meshes must have the same {what}, got {wanted!r} and {given!r}")
