"""meshdist on a Ray cluster: jobs, a backend of Ray Train, and a backend of Ray's collectives.

    import meshdist.ray

    meshdist.ray.run(train, 4)  # `train` in four tasks, which are the ranks of a world
    DataParallelTrainer(train, backend_config=meshdist.ray.MeshdistConfig(), ...)  # the same by Ray Train
    collective.init_collective_group(size, rank, backend="MESHDIST")  # in each actor; ray.util.collective

Importing this module registers the `MESHDIST` backend of ray.util.collective in this process. Ray needs it in the
driver and in all actors; for the actors,
`ray.init(runtime_env={"worker_process_setup_hook": "meshdist.ray.register"})` sees to that.

Raises:
    ImportError: Ray is missing, or too old.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshdist.ray.installed_ray import check_ray, register_when_imported

check_ray()

from meshdist.ray.ray_job import run  # noqa: E402 - needs a Ray that was checked

register_when_imported()

if TYPE_CHECKING:
    from meshdist.ray.ray_group import get_group, register, use_world
    from meshdist.ray.train_backend import MeshdistConfig

# What imports ray.util.collective or ray.train, which take seconds, is imported when it is asked for.
_LATER = {
    "MeshdistConfig": "meshdist.ray.train_backend",
    "get_group": "meshdist.ray.ray_group",
    "register": "meshdist.ray.ray_group",
    "use_world": "meshdist.ray.ray_group",
}

__all__ = ["MeshdistConfig", "get_group", "register", "run", "use_world"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'meshdist.ray' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
