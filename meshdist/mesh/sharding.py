"""Plain blocks of arrays over a mesh: split a whole array, and put the blocks together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshdist.arrays.device_types import taken
from meshdist.collectives.unequal_blocks import gathered_unequal
from meshdist.mesh.layout.axes_and_chunks import chunk_sizes

if TYPE_CHECKING:
    from meshdist.mesh.mesh_slices import MeshSlices

Dims = Mapping[int | str, int]


def shard(mesh: MeshSlices, x: Any, dims: Dims) -> Any:
    """Return this rank's block of `x`, which all ranks have whole; a view."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(mesh._outside("DeviceMesh.shard", "only its members have a block"))
    ordered = _in_order("shard", mesh, x, dims)
    index = [slice(0, rows) for rows in x.shape]
    for axis, dim in ordered:
        held = index[dim]
        sizes = chunk_sizes(held.stop - held.start, mesh.shape[axis])
        start = held.start + sum(sizes[: coordinate[axis]])
        index[dim] = slice(start, start + sizes[coordinate[axis]])
    return x[tuple(index)]


def unshard(mesh: MeshSlices, block: Any, dims: Dims) -> Any:
    """Return the whole array of which every rank passes its block."""
    block = taken(block)
    for axis, dim in reversed(_in_order("unshard", mesh, block, dims)):
        block = gathered_unequal(block, mesh.get_group(axis), dim, None, "all_gather")
    return block


def _in_order(method: str, mesh: MeshSlices, x: Any, dims: Dims) -> list[tuple[int, int]]:
    """Return the mesh axes of `dims` in mesh order, the outermost first, with the dimension that each cuts."""
    if not isinstance(dims, Mapping):
        raise TypeError(f"DeviceMesh.{method}: expected a dict mapping axes to dimensions, got {dims!r}")
    if not hasattr(x, "ndim"):
        raise TypeError(
            f"DeviceMesh.{method}: expected an array, got {x!r} ({type(x).__name__}); convert it with np.asarray"
        )
    found: dict[int, int] = {}
    for axis, dim in dims.items():
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"DeviceMesh.{method}: a dimension is an integer, got {dim!r} for axis {axis!r}")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(
                f"DeviceMesh.{method}: axis {axis!r} shards dimension {dim}, and the array has the shape {x.shape}"
            )
        at = mesh._layout.axis(axis)
        if at in found:
            raise ValueError(f"DeviceMesh.{method}: axis {axis!r} is given twice, in {dict(dims)}")
        found[at] = dim % x.ndim
    return sorted(found.items())
