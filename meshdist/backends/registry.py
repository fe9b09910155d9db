"""The backends by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdist.backends.base import Backend, BackendOptions

DEFAULT_BACKEND = "gloo"

# Name -> module and class, imported when a group of that backend makes its first call.
_BACKENDS = {
    "gloo": ("meshdist.backends.gloo.backend", "GlooBackend"),
    "threads": ("meshdist.backends.threads", "ThreadsBackend"),
}


def backend_name(name: str | None) -> str:
    """Return the registered spelling of `name`, which may be in any case; the default for None.

    Raises:
        TypeError: It is no string.
        ValueError: No backend has this name; the message lists the known ones.
    """
    if name is None:
        return DEFAULT_BACKEND
    if not isinstance(name, str):
        raise TypeError(f"backend must be a name, one of {', '.join(sorted(_BACKENDS))}, got {name!r}")
    if name.lower() not in _BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known are {', '.join(sorted(_BACKENDS))}")
    return name.lower()


def make_backend(name: str, options: BackendOptions) -> Backend:
    """Return a new backend of that name, for one group."""
    module, cls = _BACKENDS[name]
    backend: Backend = getattr(import_module(module), cls)(options)
    return backend
