"""Access to the current World.

The World of a rank that is a process is in a process-wide slot. A rank that is a thread has its own slot, in a context
variable. Apart from the table of registered backends, this is the only mutable module state of the package.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

from meshdist import core

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import DryRunView, Group, HasGroup, WorldView

# What a `group` argument may be: a ProcessGroup, a DeviceMesh, what `new_group` returned, or None for the world.
GroupLike: TypeAlias = "HasGroup | None"


class WorldSlot:
    __slots__ = ("__weakref__", "dry", "had_world", "orphaned", "orphans_forks", "world")

    def __init__(self) -> None:
        self.world: WorldView | None = None  # None before init_process_group and after destroy_process_group
        self.had_world = False  # whether a World has been destroyed
        self.dry: DryRunView | None = None  # the dry run that owns the slot; None for a rank that has peers
        self.orphaned: str | None = None  # in a process forked from a rank: why it has no World
        self.orphans_forks = False  # whether forked processes will be detached

    def empty(self) -> None:
        self.world = None
        self.had_world = True
        core.world_changed()


_slot: ContextVar[WorldSlot] = ContextVar("meshdist_world", default=WorldSlot())  # noqa: B039 - shared on purpose


def current_slot() -> WorldSlot:
    return _slot.get()


def use_slot(slot: WorldSlot) -> None:
    _slot.set(slot)
    core.use_many_worlds(_slot)


def is_initialized() -> bool:
    """Return True between `init_process_group` and `destroy_process_group`."""
    return _slot.get().world is not None


def current_world() -> WorldView:
    """Return the World of this rank.

    Raises:
        ValueError: `init_process_group` has not been called.
    """
    slot = _slot.get()
    if slot.world is None:
        if slot.orphaned is not None:
            raise ValueError(f"the default process group {slot.orphaned}")
        state = "has already been destroyed" if slot.had_world else "has not been initialized"
        raise ValueError(f"the default process group {state}; call meshdist.init_process_group() first")
    return slot.world


def resolve(group: GroupLike = None) -> Group:
    """Return the ProcessGroup that `group` means: itself, a mesh's, or the world's if it is None."""
    if group is None:
        world = _slot.get().world
        return (world or current_world()).default_group  # current_world raises with the reason
    try:
        return group.collective_group
    except AttributeError:
        from meshdist.system.name_hints import not_a_group  # only needed here

        raise not_a_group(group) from None
