"""What a mesh stands in: the world of its ranks and the kind of device their arrays live on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.current import current_world, is_initialized
from meshdist.world import init_process_group

if TYPE_CHECKING:
    from meshdist.world import World

DEVICE_TYPES = ("cpu", "cuda")


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


def world_or_init() -> World:
    """Return the world of this rank, initialised from the launcher's environment if it is not yet."""
    if not is_initialized():
        init_process_group()
    return current_world()
