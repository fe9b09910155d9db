"""The Ray that is installed: check that it has what `meshdist.ray` builds on, and register backend MESHDIST with it.

The backend is registered as soon as ray.util.collective is imported. `import meshdist.ray` alone does not import it:
where torch is installed, ray.util.collective imports torch, which takes seconds in each worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

TESTED = "2.60.0"
_JOBS = {
    "ray.experimental.internal_kv": ("_internal_kv_del", "_internal_kv_get", "_internal_kv_put"),
    "ray.util": ("get_node_ip_address",),
    "ray.util.placement_group": ("placement_group", "remove_placement_group"),
    "ray.util.scheduling_strategies": ("PlacementGroupSchedulingStrategy",),
}
_COLLECTIVE = "ray.util.collective"
_COLLECTIVES = {
    _COLLECTIVE: ("get_group_handle", "register_collective_backend"),
    "ray.util.collective.types": ("Backend",),
    "ray.util.collective.collective_group.base_collective_group": ("BaseGroup",),
}
_ADVICE = f"install Ray {TESTED}, with which meshdist.ray is tested: pip install 'ray>=2.60'"


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


def register_when_imported() -> None:
    """Register the backend now if ray.util.collective is imported, and else when it will be.

    Raises:
        ImportError: Ray is too old for backends of other packages.
    """
    if _COLLECTIVE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    check_collectives()
    # This registers the backend, at the end of the import if that is under way.
    import_module("meshdist.ray.ray_group")


class _Finder(MetaPathFinder):
    """Finds ray.util.collective as the others do, once, and has it register the backend after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COLLECTIVE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()
