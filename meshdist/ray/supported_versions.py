"""Which versions of Ray are supported: those that have what `meshdist.ray` builds on."""

from __future__ import annotations

from importlib import import_module

TESTED = "2.60.0"
_JOBS = {
    "ray.experimental.internal_kv": ("_internal_kv_del", "_internal_kv_get", "_internal_kv_put"),
    "ray.util": ("get_node_ip_address",),
    "ray.util.placement_group": ("placement_group", "remove_placement_group"),
    "ray.util.scheduling_strategies": ("PlacementGroupSchedulingStrategy",),
}
_COLLECTIVES = {
    "ray.util.collective": ("get_group_handle", "register_collective_backend"),
    "ray.util.collective.types": ("Backend",),
    "ray.util.collective.collective_group.base_collective_group": ("BaseGroup",),
}
_ADVICE = f"install Ray {TESTED}, with which meshdist.ray is tested: pip install 'meshdist[ray]'"


def check_ray() -> None:
    """Raise ImportError, with what to install, unless jobs can run with the Ray that is installed."""
    try:
        import_module("ray")
    except ModuleNotFoundError as error:
        raise ImportError(f"meshdist.ray needs Ray; {_ADVICE}", name="ray") from error
    _check(_JOBS)


def check_collectives() -> None:
    """Raise ImportError, with what to install, unless Ray's collectives take backends of other packages."""
    _check(_COLLECTIVES)


def _check(names: dict[str, tuple[str, ...]]) -> None:
    version: str = import_module("ray").__version__
    for module, wanted in names.items():
        try:
            found = import_module(module)
        except ModuleNotFoundError:
            raise ImportError(
                f"Ray {version} has no {module}, which meshdist.ray builds on; {_ADVICE}", name="ray"
            ) from None
        missing = [name for name in wanted if not hasattr(found, name)]
        if missing:
            raise ImportError(
                f"Ray {version} has no {', '.join(missing)} in {module}, which meshdist.ray builds on; {_ADVICE}",
                name="ray",
            )
