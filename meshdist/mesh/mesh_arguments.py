"""Check the arguments of a mesh: its world, the device type of its arrays, and the backends of its axes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from meshdist.backends.device_backends import (
    backend_name,
    by_device,
    carrier_of,
    get_default_backend_for_device,
    pairs_of,
    usable_backend_name,
)
from meshdist.backends.registry import DEVICE_TYPES, check_usable
from meshdist.errors import DistBackendError
from meshdist.groups.world import current_world
from meshdist.lifecycle import destroy_process_group, init_process_group
from meshdist.mesh.layout.layout import Layout
from meshdist.runtime.context import is_initialized
from meshdist.system.platform import num_gpus

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup
    from meshdist.groups.world import World


P = ParamSpec("P")
R = TypeVar("R")


def checked_device_type(device_type: str, *, is_first: bool = False) -> str:
    """Return `device_type`; raise ValueError for an unknown type or one with an index, such as "cuda:0".

    With `is_first`, it is the first argument of the user's call.
    """
    if not isinstance(device_type, str):
        got = f"{device_type!r} ({type(device_type).__name__})"
        hint = "; the first argument is the device type, 'cpu' or 'cuda'" if is_first else ""
        raise TypeError(f"device_type: expected a string, got {got}{hint}")
    if device_type in DEVICE_TYPES:
        return device_type
    kind, colon, _ = device_type.partition(":")
    if colon and kind in DEVICE_TYPES:
        raise ValueError(f"device_type: expected a type without an index, got {device_type!r}; write {kind!r}")
    raise ValueError(f"device_type: expected one of {', '.join(map(repr, DEVICE_TYPES))}, got {device_type!r}")


def check_carried(device_type: str, backends: Iterable[str | None]) -> None:
    """Check that one of the backends of a mesh's axes, None for the world's or its default, can send these arrays."""
    default = current_world().backend_name if is_initialized() else backend_name(None)
    chosen = {default if backend is None else backend for backend in backends}
    carriers = [by_device(backend)[device_type] for backend in chosen if device_type in by_device(backend)]
    if not carriers and device_type == "cuda" and num_gpus() > 0:
        # By way of the CPU; without a GPU, the error says what is missing.
        carriers = [carrier for backend in chosen if (carrier := carrier_of(backend, device_type)) is not None]
    of_its_own = get_default_backend_for_device(device_type)
    try:
        check_usable((carriers or [of_its_own])[0])
    except DistBackendError as error:
        raise DistBackendError(
            f"device_type: a mesh of {device_type!r} needs a backend for its arrays: {error}"
        ) from None
    if not carriers:
        raise ValueError(
            f"device_type: a mesh of {device_type!r} needs a backend for its arrays, and there is"
            f" {' and '.join(map(pairs_of, sorted(chosen)))}; call init_process_group with backend={of_its_own!r} or"
            " pairs such as 'cpu:gloo,cuda:nccl', or pass backend_override"
        )


@contextmanager
def world_ended_on_refusal() -> Iterator[None]:
    """Destroy the default group if the block created it and then raises, so that a script can retry."""
    was_there = is_initialized()
    try:
        yield
    except BaseException:
        if not was_there and is_initialized():
            destroy_process_group()
        raise


def num_ranks_of(universe: ProcessGroup | None) -> int | None:
    """Return how many ranks a mesh may have; None if the world is not initialized, and its size is not known yet."""
    if universe is not None:
        return universe.size()
    if is_initialized():
        return current_world().size
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else None


def world_or_init() -> World:
    if not is_initialized():
        init_process_group()
    return current_world()


# A backend, or a pair of a backend and its options: `backend` and `pg_options` of `new_group`.
BackendChoice: TypeAlias = "str | tuple[str, Any]"


class BackendWithOptions(str):
    """A backend name with options. Equal to the plain name, since the name is the key of the groups."""

    options: Any

    def __new__(cls, name: str, options: Any) -> BackendWithOptions:
        made = super().__new__(cls, name)
        made.options = options
        return made

    def __getnewargs__(self) -> tuple[str, Any]:  # type: ignore[override]
        return str(self), self.options


def axis_backends(layout: Layout, override: Mapping[int | str, BackendChoice] | None) -> tuple[str | None, ...]:
    """Return the backend name of each axis of `layout`; None for axes that `override` does not name."""
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
    """Return the common backend of all axes; None (the world's) if they differ."""
    return backends[0] if len(set(backends)) == 1 else None
