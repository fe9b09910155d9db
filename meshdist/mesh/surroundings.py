"""What a mesh stands in: the world of its ranks and the kind of device their arrays live on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshdist.backends.device_backends import backend_name, by_device, get_default_backend_for_device, pairs_of
from meshdist.backends.registry import DEVICE_TYPES, check_usable
from meshdist.current import current_world, is_initialized
from meshdist.errors import DistBackendError
from meshdist.start_and_end import destroy_process_group, init_process_group

if TYPE_CHECKING:
    from meshdist.world import World


def checked_device_type(device_type: str) -> str:
    """Return `device_type` if meshes know it.

    Raises:
        ValueError: It carries an index, such as "cuda:0", or is unknown.
        TypeError: It is not a string.
    """
    if not isinstance(device_type, str):
        raise TypeError(f"device_type: expected a string, got {device_type!r} ({type(device_type).__name__})")
    if device_type in DEVICE_TYPES:
        return device_type
    kind, colon, _ = device_type.partition(":")
    if colon and kind in DEVICE_TYPES:
        raise ValueError(f"device_type: expected a type without an index, got {device_type!r}; write {kind!r}")
    raise ValueError(f"device_type: expected one of {', '.join(map(repr, DEVICE_TYPES))}, got {device_type!r}")


def check_carried(device_type: str, backends: Iterable[str | None]) -> None:
    """Check that arrays of `device_type` can be sent along some axis of a mesh.

    Args:
        device_type: A known one.
        backends: Those of the axes, None for the world's. Where there is no world yet, it is what the world is going to
            have if nobody says otherwise.

    Raises:
        DistBackendError: The device type's own backend cannot be used here; says why.
        ValueError: None of the backends carries arrays of this type.
    """
    default = current_world().backend_name if is_initialized() else backend_name(None)
    chosen = {default if backend is None else backend for backend in backends}
    carriers = [by_device(backend)[device_type] for backend in chosen if device_type in by_device(backend)]
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
            " pairs such as 'cpu:gloo,cuda:nccl', or give backend_override"
        )


@contextmanager
def world_ended_on_refusal() -> Iterator[None]:
    """If the block initialises the default group and then raises, end it, so that a script can try another way."""
    was_there = is_initialized()
    try:
        yield
    except BaseException:
        if not was_there and is_initialized():
            destroy_process_group()
        raise


def world_or_init() -> World:
    """Return the world of this rank, initialised from the launcher's environment if it is not yet."""
    if not is_initialized():
        init_process_group()
    return current_world()
