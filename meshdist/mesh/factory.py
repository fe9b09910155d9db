"""init_device_mesh: make a mesh of ranks 0, 1, 2, ... in row-major order, or placed by a topology."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdist.groups.world import current_world
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.mesh.given_groups import group_backend, universe_of
from meshdist.mesh.layout.axes_and_chunks import checked_names, checked_sizes
from meshdist.mesh.mesh_arguments import (
    BackendChoice,
    check_carried,
    checked_device_type,
    num_ranks_of,
    world_ended_on_refusal,
    world_or_init,
)
from meshdist.mesh.mesh_check import refusals_reported
from meshdist.runtime.context import GroupLike
from meshdist.system.name_hints import explaining
from meshdist.system.plurals import counted


@explaining
def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, BackendChoice] | None = None,
    group: GroupLike = None,
    topology: Any = None,
) -> DeviceMesh:
    """Create a mesh of the first ranks of the world in row-major order; initialize the default group if necessary.

    With `topology`, ranks are placed so that the last axes, or the axes that it names, stay inside hosts (see
    `Topology.place`).

    Every rank calls it with the same arguments. If it raises, it destroys a default group that it initialized. Ranks
    beyond the size of the mesh are outside: they also get the mesh, with `get_coordinate()` None and without groups.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh_shape: The number of ranks along each axis; the product is at most the world size.
        mesh_dim_names: One unique name per axis; needed for slicing.
        backend_override: A dict that maps an axis, by name or index, to the backend that its group uses in place of the
            world's, or to a pair of the backend and its options (`pg_options` of `new_group`).
        group: A process group or mesh whose ranks form the mesh, in its order; only they call. The world if None.
        topology: Where the ranks run: True or "auto" to detect it, a `Topology`, the path of a TOML file, a networkx
            graph, or `topology.inside("tp")` to keep axes inside a host. Equal on all ranks. `show`, `print` and
            `account` of the mesh use its hosts. None: ranks in ascending order, on their actual hosts.

    Raises:
        ValueError: Sizes below 1 or a product above the world size, repeated names or a wrong number of names, an
            unknown device type, or no default group and an incomplete environment to initialize it from.
        TypeError: Sizes that are not integers, names that are not strings.
        DistBackendError: "cuda" without a backend for GPU arrays; the message names what is missing.

    Example:
        >>> import meshdist
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     return mesh.get_coordinate(), mesh["dp"].mesh.tolist()
        >>> meshdist.run(program, 4)
        [((0, 0), [0, 2]), ((0, 1), [1, 3]), ((1, 0), [0, 2]), ((1, 1), [1, 3])]
    """
    universe = universe_of(group)
    with world_ended_on_refusal(), refusals_reported(universe):
        checked_device_type(device_type, is_first=True)
        shape = checked_sizes("mesh_shape", mesh_shape, num_ranks_of(universe))
        if mesh_dim_names is not None:
            mesh_dim_names = checked_names(mesh_dim_names, shape)
        if backend_override is None:
            check_carried(device_type, [group_backend(universe)])
        ranks_needed = math.prod(shape)
        members = world_or_init().default_group if universe is None else universe
        if ranks_needed > members.size():
            product = f"{' x '.join(map(str, shape))} = " if len(shape) > 1 else ""
            whole = "world" if universe is None else f"group {universe.label!r}"
            raise ValueError(
                f"init_device_mesh: mesh_shape {shape} needs {product}{counted(ranks_needed, 'rank')}, but the {whole}"
                f" has {members.size()}; start {ranks_needed} (meshrun -n {ranks_needed}) or create a smaller mesh"
            )
        ranks = np.arange(ranks_needed) if universe is None else np.array(universe.ranks[:ranks_needed])
        placement = None
        if topology is not None and topology is not False:
            from meshdist.topology.topology import placement_of

            placement = placement_of(topology, current_world().size)
            ranks = placement.place(shape, mesh_dim_names, None if universe is None else universe.ranks)
    mesh = DeviceMesh(
        device_type,
        ranks.reshape(shape),
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
        group=universe,
    )
    if placement is not None:
        mesh._topology = placement.topology
    return mesh
