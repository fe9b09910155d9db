"""The one accessor of the current World.

A rank is usually a process, and its World sits in the process-wide slot. A rank can be a thread as well: its context
then carries a slot of its own, which is found first. This is the only mutable state of the package.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from meshdist.collectives.methods import CollectiveMethods
    from meshdist.dry_run import DryRun
    from meshdist.process_group import ProcessGroup
    from meshdist.world import World

# What a `group` argument may be: a ProcessGroup, a DeviceMesh, what `new_group` returned, or None for the world.
GroupLike: TypeAlias = "CollectiveMethods | None"


class WorldSlot:
    """Holds the World of a process, or of a thread that is a rank; None before init and after destroy.

    Attributes:
        world: The World, if there is one.
        had_world: Whether there was one that has been destroyed.
        dry: The dry run that the slot is of; None for a rank that has peers.
        orphaned: In a process that was forked of a rank: that this one is none.
        orphans_forks: Whether that is seen to.
    """

    __slots__ = ("__weakref__", "dry", "had_world", "orphaned", "orphans_forks", "world")

    def __init__(self) -> None:
        self.world: World | None = None
        self.had_world = False
        self.dry: DryRun | None = None
        self.orphaned: str | None = None
        self.orphans_forks = False

    def empty(self) -> None:
        """Take the World out, as it is destroyed."""
        self.world = None
        self.had_world = True


_slot: ContextVar[WorldSlot] = ContextVar("meshdist_world", default=WorldSlot())  # noqa: B039 - shared on purpose


def current_slot() -> WorldSlot:
    """Return the slot that this context's World is in."""
    return _slot.get()


def use_slot(slot: WorldSlot) -> None:
    """Make `slot` the one of the current context, which becomes a rank of its own."""
    _slot.set(slot)


def is_initialized() -> bool:
    """Return True between `init_process_group` and `destroy_process_group`."""
    return _slot.get().world is not None


def current_world() -> World:
    """Return the World of this rank.

    Raises:
        ValueError: `init_process_group` has not been called.
    """
    slot = _slot.get()
    if slot.world is None:
        if slot.orphaned is not None:
            raise ValueError(f"the default process group {slot.orphaned}")
        state = "was destroyed already" if slot.had_world else "is not there yet"
        raise ValueError(f"the default process group {state}; call meshdist.init_process_group() first")
    return slot.world


def resolve(group: GroupLike = None) -> ProcessGroup:
    """Return the ProcessGroup that `group` means: itself, a mesh's, or the world's where it is None."""
    if group is None:
        world = _slot.get().world
        return (world or current_world()).default_group  # which says why there is none
    try:
        return group.collective_group
    except AttributeError:
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}") from None
