"""Lets sphinx.ext.viewcode link methods that a public class inherits to the file that defines them."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import meshdist
import meshdist.tensor


def defining_module(app: Any, module: str, name: str | None) -> str | None:
    """Return the module that defines `name` of `module`, such as `DeviceMesh.flatten`: "viewcode-follow-imported"."""
    owner, _, method = (name or "").rpartition(".")
    cls = getattr(import_module(module), owner, None) if owner else None
    if not inspect.isclass(cls):
        return None
    home = next((base.__module__ for base in cls.__mro__ if method in vars(base)), "")
    return home if home.startswith("meshdist.") else None


def source(app: Any, module: str) -> tuple[str, dict[str, tuple[str, int, int]]] | None:
    """Return the text of a module, and the lines of what is in it: "viewcode-find-source"."""
    if not module.startswith("meshdist."):
        return None
    analyzer = ModuleAnalyzer.for_module(module)
    tags = dict(analyzer.find_tags())
    for cls, base in _inheritances(module):
        inherited = {name: tag for name, tag in tags.items() if name.startswith(f"{base}.")}
        tags.update({cls + name.removeprefix(base): tag for name, tag in inherited.items()})
    return analyzer.code, tags


def _inheritances(module: str) -> Iterator[tuple[str, str]]:
    """Yield the public classes with a base class in `module`, and that base class."""
    for package in (meshdist, meshdist.tensor):
        for cls in filter(inspect.isclass, (getattr(package, name) for name in package.__all__)):
            yield from ((cls.__name__, base.__name__) for base in cls.__mro__[1:] if base.__module__ == module)
