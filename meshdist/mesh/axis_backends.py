"""Which backend each axis of a mesh was told to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshdist.backends.device_backends import usable_backend_name
from meshdist.mesh.layout import Layout


def axis_backends(layout: Layout, override: Mapping[int | str, str] | None) -> tuple[str | None, ...]:
    """Return one backend name per axis of `layout`, None where `override` names none.

    Args:
        layout: The axes.
        override: Axis, by name or index, to backend name.

    Raises:
        UnknownAxisError: A key is not an axis.
        ValueError: An axis is named twice, by name and by index, or there is no such backend.
        TypeError: `override` is not a mapping, or a value is not a string.
    """
    backends: list[str | None] = [None] * layout.ndim
    if override is None:
        return tuple(backends)
    if not isinstance(override, Mapping):
        raise TypeError(f"backend_override: expected a dict of axis to backend name, got {type(override).__name__}")
    for key, backend in override.items():
        axis = layout.axis(key)
        if not isinstance(backend, str):
            raise TypeError(
                f"backend_override[{key!r}]: expected the name of a backend, got {backend!r} ({type(backend).__name__})"
            )
        if backends[axis] is not None:
            raise ValueError(
                f"backend_override: axis {axis} of {layout.describe()} is given twice, by {list(override)}"
            )
        backends[axis] = usable_backend_name(backend)
    return tuple(backends)


def shared_backend(backends: Sequence[str | None]) -> str | None:
    """Return the backend that all of `backends` agree on, None (the world's own) where they do not."""
    return backends[0] if len(set(backends)) == 1 else None
