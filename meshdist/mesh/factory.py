"""init_device_mesh: the mesh of the ranks 0, 1, 2, ... in row-major order."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdist.mesh.axis_names import checked_names
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.mesh.surroundings import check_carried, checked_device_type, world_or_init


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, str] | None = None,
    topology: Any = None,
) -> DeviceMesh:
    """Make a mesh of the first ranks of the world in row-major order, initialising the default group if there is none.

    With `topology`, the ranks are arranged so that the last axes stay inside hosts, or those that it names, whatever
    hosts the ranks came on (`Topology.place` says how).

    Every rank calls it with the same arguments. A mesh smaller than the world leaves the ranks after its last one
    outside: they get the mesh as well, with `get_coordinate()` None, and have no groups in it.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh_shape: The number of ranks along each axis; the product is at most the world size.
        mesh_dim_names: One unique name per axis; needed for slicing.
        backend_override: Axis, by name or index, to the backend its group uses in place of the world's.
        topology: Where the ranks run: True or "auto" to find it, a `Topology`, the path of a TOML file, a networkx
            graph, or `topology.inside("tp")` to say which axes must not leave a host. Equal on all ranks. None: ranks
            in the order of their numbers.

    Raises:
        ValueError: Sizes below 1 or a product above the world size, names repeated or not as many as axes, an unknown
            device type, or no default group and no launcher's environment to initialise it from.
        TypeError: Sizes that are not integers, names that are not strings.
        DistBackendError: "cuda" where no backend carries GPU arrays; says what is missing.

    Example:
        >>> import meshdist
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     return mesh.get_coordinate(), mesh["dp"].mesh.tolist()
        >>> meshdist.run(program, 4)
        [((0, 0), [0, 2]), ((0, 1), [1, 3]), ((1, 0), [0, 2]), ((1, 1), [1, 3])]
    """
    checked_device_type(device_type)
    shape = _checked_shape(mesh_shape)
    if mesh_dim_names is not None:
        mesh_dim_names = checked_names(mesh_dim_names, shape)
    if backend_override is None:
        check_carried(device_type, [None])
    ranks_needed = math.prod(shape)
    world_size = world_or_init().size
    if ranks_needed > world_size:
        product = f"{' x '.join(map(str, shape))} = {ranks_needed}" if len(shape) > 1 else str(ranks_needed)
        raise ValueError(
            f"init_device_mesh: mesh_shape {shape} needs {product} ranks, but the world has {world_size};"
            f" start {ranks_needed} or make the mesh smaller"
        )
    ranks = np.arange(ranks_needed).reshape(shape)
    if topology is not None and topology is not False:
        from meshdist.topology.placement import placed_ranks

        ranks = placed_ranks(topology, shape, mesh_dim_names, world_size)
    return DeviceMesh(
        device_type,
        ranks,
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
    )


def _checked_shape(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    if isinstance(mesh_shape, (str, bytes)) or not hasattr(mesh_shape, "__iter__"):
        raise TypeError(f"mesh_shape: expected a tuple of sizes, such as (2, 4), got {mesh_shape!r}")
    sizes = tuple(mesh_shape)
    if not sizes:
        raise ValueError("mesh_shape: expected at least one axis, got ()")
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"mesh_shape: expected integers, got {size!r} ({type(size).__name__}) in {sizes}")
        if operator.index(size) < 1:
            raise ValueError(f"mesh_shape: every size must be at least 1, got {size} in {sizes}")
    return tuple(operator.index(size) for size in sizes)
