"""Backend `MESHDIST` of ray.util.collective: its collectives of NumPy arrays, by meshdist.

    import meshdist.ray

    collective.init_collective_group(world_size, rank, backend="MESHDIST", group_name="data")  # in each actor
    collective.allreduce(x, "data")

Importing this module registers the backend in this process. Ray needs it in the driver and in all actors:
`ray.init(runtime_env={"worker_process_setup_hook": "meshdist.ray.register"})` sees to the actors.

Raises:
    ImportError: Ray is missing, or too old for backends of other packages.
"""

from __future__ import annotations

from meshdist.ray.supported_versions import check_ray

check_ray()

from meshdist.ray.ray_group import get_group, register, use_world  # noqa: E402 - needs a Ray that was checked

register()

__all__ = ["get_group", "register", "use_world"]
