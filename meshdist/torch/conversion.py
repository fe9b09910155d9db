"""Meshes and DTensors of torch as those of meshdist, and back; DTensors over the same memory."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.dtensor import DTensor
from meshdist.tensor.placements import Partial, Placement, Replicate, Shard
from meshdist.torch.tensors import as_array

# The attribute of a mesh that holds the one of the other kind, so that all arrays of a mesh come to lie on one. Meshes
# that keep each other are freed together, which they would not be in a dict of this module.
_OTHER = "_meshdist_other"


def _dtensors() -> Any:
    # Half as long to import as torch itself, and not imported by it.
    return import_module("torch.distributed.tensor")


def dtensor_from_torch(tensor: Any, mesh: DeviceMesh | None) -> DTensor:
    local = tensor.to_local()
    block = as_array(local.wait() if hasattr(local, "wait") else local)
    if mesh is None:
        mesh = _other(tensor.device_mesh, mesh_from_torch)
    placements = [_from_torch(placement) for placement in tensor.placements]
    return DTensor.from_local(block, mesh, placements, shape=tuple(tensor.shape))


def dtensor_to_torch(array: DTensor, mesh: Any) -> Any:
    if mesh is None:
        mesh = _other(array.mesh, mesh_to_torch)
    placements = [_to_torch(placement, array) for placement in array.placements]
    # The stride of the whole array in row-major order.
    stride = torch.empty(array.shape, device="meta").stride()
    return _dtensors().DTensor.from_local(
        torch.from_numpy(array.to_local()),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(array.shape),
        stride=stride,
    )


def _other(mesh: Any, make: Any) -> Any:
    known = vars(mesh).get(_OTHER)
    if known is None:
        known = vars(mesh)[_OTHER] = make(mesh)
        vars(known)[_OTHER] = mesh
    return known


def _from_torch(placement: Any) -> Placement:
    torch_tensor = _dtensors()
    if type(placement) is torch_tensor.Shard:
        return Shard(placement.dim)
    if type(placement) is torch_tensor.Replicate:
        return Replicate()
    if type(placement) is torch_tensor.Partial:
        return Partial(placement.reduce_op)
    raise ValueError(
        f"from_torch: placements must be Shard, Replicate or Partial, got {placement!r}; redistribute the DTensor first"
    )


def _to_torch(placement: Placement, array: DTensor) -> Any:
    torch_tensor = _dtensors()
    if isinstance(placement, Partial):
        return torch_tensor.Partial(placement.op)
    if isinstance(placement, Replicate):
        return torch_tensor.Replicate()
    if placement.sizes is not None:
        raise ValueError(
            f"to_torch: torch needs blocks of equal sizes, but the array is {array.layout.describe(None)}; write"
            f" x.redistribute(...) with Shard({placement.dim}) first"
        )
    return torch_tensor.Shard(placement.dim)


def from_torch(given: Any, mesh: DeviceMesh | None = None) -> DeviceMesh | DTensor:
    """Return a mesh of torch as a mesh of meshdist, or a DTensor of torch as one of meshdist.

    A mesh has groups of its own, so calls on it and calls on the groups of the other are not ordered with each other.
    All ranks of the world call it, as for `DeviceMesh`. A DTensor shares its memory with `given`; its mesh is made the
    first time that one of the mesh of `given` is needed.

    Args:
        given: A `torch.distributed.device_mesh.DeviceMesh` for CPU tensors: a whole one, not a slice. Slice the result.
            Or a `torch.distributed.tensor.DTensor` in CPU memory.
        mesh: For a DTensor, the mesh of meshdist with the same ranks and axes; None: one is made.

    Raises:
        TypeError: Neither a mesh nor a DTensor of torch.
        ValueError: A slice, a mesh for another device, or a placement that is not Shard, Replicate or Partial; see
            `DeviceMesh` for the rest.
    """
    if isinstance(given, _dtensors().DTensor):
        return dtensor_from_torch(given, mesh)
    return mesh_from_torch(given)


def to_torch(given: Any, mesh: Any = None) -> Any:
    """Return a mesh of meshdist as a mesh of torch, or a DTensor of meshdist as one of torch.

    A mesh has groups of its own, which torch makes by its default backend. All ranks of the world call it. A DTensor
    shares its memory with `given`; its mesh is made the first time that one of the mesh of `given` is needed.

    Args:
        given: A mesh for CPU arrays: a whole one, not a slice. Or a DTensor.
        mesh: For a DTensor, the mesh of torch with the same ranks and axes; None: one is made.

    Raises:
        TypeError: Neither a mesh nor a DTensor of meshdist.
        ValueError: A slice, a mesh for another device, or blocks that are not those of `torch.chunk`.
    """
    if isinstance(given, DTensor):
        return dtensor_to_torch(given, mesh)
    return mesh_to_torch(given)


def mesh_from_torch(mesh: Any) -> DeviceMesh:
    if not isinstance(mesh, TorchMesh):
        raise TypeError(f"from_torch: mesh must be a torch DeviceMesh or DTensor, got {type(mesh).__name__}")
    if mesh._get_root_mesh() is not mesh:
        raise ValueError(
            f"from_torch: mesh is the slice {mesh.mesh_dim_names} of another mesh; pass the whole one, and slice what"
            " this returns"
        )
    if mesh.device_type != "cpu":
        raise ValueError(f"from_torch: mesh must be for device type 'cpu', got {mesh.device_type!r}")
    return DeviceMesh("cpu", mesh.mesh.numpy(), mesh_dim_names=mesh.mesh_dim_names)


def mesh_to_torch(mesh: DeviceMesh) -> Any:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"to_torch: mesh must be a DeviceMesh or DTensor of meshdist, got {type(mesh).__name__}")
    if mesh._root is not mesh:
        raise ValueError(f"to_torch: mesh is the slice {mesh.mesh_dim_names} of another mesh; pass the whole one")
    if mesh.device_type != "cpu":
        raise ValueError(f"to_torch: mesh must be for device type 'cpu', got {mesh.device_type!r}")
    return TorchMesh("cpu", np.asarray(mesh.mesh), mesh_dim_names=mesh.mesh_dim_names)
