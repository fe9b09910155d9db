"""Which backend each axis of a mesh was told to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from meshdist.backends.device_backends import usable_backend_name
from meshdist.mesh.layout import Layout

# A backend, or a pair of it and its options: what `new_group` calls `backend` and `pg_options`.
BackendChoice: TypeAlias = "str | tuple[str, Any]"


class BackendWithOptions(str):
    """The name of a backend that was given options; equal to the name alone, since groups are found by it.

    Attributes:
        options: What the backend is given.
    """

    options: Any

    def __new__(cls, name: str, options: Any) -> BackendWithOptions:
        """Return `name` with `options`."""
        made = super().__new__(cls, name)
        made.options = options
        return made

    def __getnewargs__(self) -> tuple[str, Any]:  # type: ignore[override]
        return str(self), self.options


def axis_backends(layout: Layout, override: Mapping[int | str, BackendChoice] | None) -> tuple[str | None, ...]:
    """Return one backend name per axis of `layout`, None where `override` names none.

    Args:
        layout: The axes.
        override: Axis, by name or index, to backend name, or to a pair of it and its options.

    Raises:
        UnknownAxisError: A key is not an axis.
        ValueError: An axis is named twice, by name and by index, or there is no such backend.
        TypeError: `override` is not a mapping, or a value is neither a string nor such a pair.
    """
    backends: list[str | None] = [None] * layout.ndim
    if override is None:
        return tuple(backends)
    if not isinstance(override, Mapping):
        raise TypeError(f"backend_override: expected a dict of axis to backend name, got {type(override).__name__}")
    for key, choice in override.items():
        axis = layout.axis(key)
        backend, options = choice if isinstance(choice, tuple) and len(choice) == 2 else (choice, None)
        if not isinstance(backend, str):
            raise TypeError(
                f"backend_override[{key!r}]: expected the name of a backend, or a pair of it and its options, got"
                f" {choice!r} ({type(choice).__name__})"
            )
        if backends[axis] is not None:
            raise ValueError(
                f"backend_override: axis {axis} of {layout.describe()} is given twice, by {list(override)}"
            )
        name = usable_backend_name(backend)
        backends[axis] = name if options is None else BackendWithOptions(name, options)
    return tuple(backends)


def shared_backend(backends: Sequence[str | None]) -> str | None:
    """Return the backend that all of `backends` agree on, None (the world's own) where they do not."""
    return backends[0] if len(set(backends)) == 1 else None
