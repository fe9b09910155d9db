"""Registers backend MESHDIST with ray.util.collective, as soon as that is imported.

`import meshdist.ray` alone does not import it: where torch is installed, ray.util.collective imports torch, which takes
seconds in each worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_COLLECTIVE = "ray.util.collective"


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
    from meshdist.ray.supported_versions import check_collectives

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
