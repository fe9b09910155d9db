"""Which versions of Ray the backend supports: those that have what it builds on."""

from __future__ import annotations

from importlib import import_module

TESTED = "2.60.0"
_NAMES = {
    "ray.util.collective": ("get_group_handle", "register_collective_backend"),
    "ray.util.collective.types": ("Backend",),
    "ray.util.collective.collective_group.base_collective_group": ("BaseGroup",),
    "ray.experimental.internal_kv": ("_internal_kv_del", "_internal_kv_get", "_internal_kv_put"),
    "ray.util": ("get_node_ip_address",),
}


def check_ray() -> None:
    """Raise ImportError, with what to install, unless the backend can run with the Ray that is installed."""
    advice = f"install Ray {TESTED}, with which the backend is tested: pip install 'meshdist[ray]'"
    try:
        version: str = import_module("ray").__version__
    except ModuleNotFoundError as error:
        raise ImportError(f"meshdist.ray needs Ray; {advice}", name="ray") from error
    for module, names in _NAMES.items():
        try:
            found = import_module(module)
        except ModuleNotFoundError:
            raise ImportError(
                f"Ray {version} has no {module}, which meshdist.ray builds on; {advice}", name="ray"
            ) from None
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            raise ImportError(
                f"Ray {version} has no {', '.join(missing)} in {module}, which meshdist.ray builds on; {advice}",
                name="ray",
            )
