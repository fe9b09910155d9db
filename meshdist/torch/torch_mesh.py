"""Meshes of torch as meshes of meshdist, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from meshdist.mesh.device_mesh import DeviceMesh


def from_torch(mesh: Any) -> DeviceMesh:
    """Return a mesh of meshdist with the ranks and axes of a mesh of torch.

    It has groups of its own, so calls on it and calls on the groups of `mesh` are not ordered with each other. All
    ranks of the world call it, as for `DeviceMesh`.

    Args:
        mesh: A `torch.distributed.device_mesh.DeviceMesh` for CPU tensors: a whole one, not a slice. Slice the result.

    Raises:
        TypeError: Not a mesh of torch.
        ValueError: A slice, or for another device; see `DeviceMesh` for the rest.
    """
    if not isinstance(mesh, TorchMesh):
        raise TypeError(f"from_torch: mesh must be a torch DeviceMesh, got {type(mesh).__name__}")
    if mesh._get_root_mesh() is not mesh:
        raise ValueError(
            f"from_torch: mesh is the slice {mesh.mesh_dim_names} of another mesh; pass the whole one, and slice what"
            " this returns"
        )
    if mesh.device_type != "cpu":
        raise ValueError(f"from_torch: mesh must be for device type 'cpu', got {mesh.device_type!r}")
    return DeviceMesh("cpu", mesh.mesh.numpy(), mesh_dim_names=mesh.mesh_dim_names)


def to_torch(mesh: DeviceMesh) -> Any:
    """Return a mesh of torch with the ranks and axes of a mesh of meshdist.

    It has groups of its own, which torch makes by its default backend. All ranks of the world call it.

    Args:
        mesh: A mesh for CPU arrays: a whole one, not a slice.

    Raises:
        TypeError: Not a mesh of meshdist.
        ValueError: A slice, or for another device.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"to_torch: mesh must be a DeviceMesh of meshdist, got {type(mesh).__name__}")
    if mesh._root is not mesh:
        raise ValueError(f"to_torch: mesh is the slice {mesh.mesh_dim_names} of another mesh; pass the whole one")
    if mesh.device_type != "cpu":
        raise ValueError(f"to_torch: mesh must be for device type 'cpu', got {mesh.device_type!r}")
    return TorchMesh("cpu", np.asarray(mesh.mesh), mesh_dim_names=mesh.mesh_dim_names)
