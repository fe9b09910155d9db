"""init_device_mesh: the mesh of the ranks 0, 1, 2, ... in row-major order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdist.current import GroupLike, current_world
from meshdist.mesh.agreement import refusals_told
from meshdist.mesh.axis_backends import BackendChoice
from meshdist.mesh.axis_names import checked_names
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.mesh.given_groups import group_backend, universe_of
from meshdist.mesh.sizes import checked_sizes
from meshdist.mesh.surroundings import check_carried, checked_device_type, world_ended_on_refusal, world_or_init


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, BackendChoice] | None = None,
    group: GroupLike = None,
    topology: Any = None,
) -> DeviceMesh:
    """Make a mesh of the first ranks of the world in row-major order, initialising the default group if there is none.

    With `topology`, the ranks are arranged so that the last axes stay inside hosts, or those that it names, whatever
    hosts the ranks came on (`Topology.place` says how).

    Every rank calls it with the same arguments. Where they are refused, a default group that this call initialised is
    ended again. A mesh smaller than the world leaves the ranks after its last one
    outside: they get the mesh as well, with `get_coordinate()` None, and have no groups in it.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh_shape: The number of ranks along each axis; the product is at most the world size.
        mesh_dim_names: One unique name per axis; needed for slicing.
        backend_override: Axis, by name or index, to the backend its group uses in place of the world's, or
            to a pair of it and its options, which are what `new_group` calls `pg_options`.
        group: A process group or another mesh: the mesh is made of its ranks, in its order, and by them alone. The
            world where None.
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
    universe = universe_of(group)
    with world_ended_on_refusal(), refusals_told(universe):
        checked_device_type(device_type)
        shape = checked_sizes("mesh_shape", mesh_shape)
        if mesh_dim_names is not None:
            mesh_dim_names = checked_names(mesh_dim_names, shape)
        if backend_override is None:
            check_carried(device_type, [group_backend(universe)])
        ranks_needed = math.prod(shape)
        members = world_or_init().default_group if universe is None else universe
        if ranks_needed > members.size():
            product = f"{' x '.join(map(str, shape))} = {ranks_needed}" if len(shape) > 1 else str(ranks_needed)
            whole = "world" if universe is None else f"group {universe.label!r}"
            raise ValueError(
                f"init_device_mesh: mesh_shape {shape} needs {product} ranks, but the {whole} has {members.size()};"
                f" start {ranks_needed} or make the mesh smaller"
            )
        ranks = np.arange(ranks_needed) if universe is None else np.array(universe.ranks[:ranks_needed])
        if topology is not None and topology is not False:
            from meshdist.topology.placement import placed_ranks

            among = None if universe is None else universe.ranks
            ranks = placed_ranks(topology, shape, mesh_dim_names, current_world().size, among)
    return DeviceMesh(
        device_type,
        ranks.reshape(shape),
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
        group=universe,
    )
