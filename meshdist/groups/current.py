"""The current World with its full type, for the layers above `runtime`, and the worlds of forked processes."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, cast

from meshdist.runtime import context
from meshdist.runtime.context import GroupLike, WorldSlot

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup
    from meshdist.groups.world import World
    from meshdist.runtime.context import WorldSlot


def current_world() -> World:
    """Return the World of this rank."""
    return cast("World", context.current_world())


def world_in(slot: WorldSlot) -> World | None:
    """Return the World in a slot, if there is one."""
    return cast("World | None", slot.world)


def resolve(group: GroupLike = None) -> ProcessGroup:
    """Return the ProcessGroup that `group` means: itself, a mesh's, or the world's if it is None."""
    return cast("ProcessGroup", context.resolve(group))


def orphan_forks(slot: WorldSlot) -> None:
    """Detach all future forked children from the world in `slot`.

    A child has the memory and sockets of the rank, but not its threads, and its peers do not know it. So its calls
    raise, its exit is silent, and inherited descriptors that would make the rank look alive are closed.
    """
    if slot.orphans_forks or not hasattr(os, "register_at_fork"):
        return
    slot.orphans_forks = True
    known = weakref.ref(slot)

    def in_child() -> None:
        slot = known()
        world = None if slot is None else world_in(slot)
        if slot is not None and world is not None:
            slot.world, slot.orphaned = None, is_of_parent(world.rank, world.card.pid)
            world.disown(slot.orphaned)

    os.register_at_fork(after_in_child=in_child)


def is_of_parent(rank: int, pid: int) -> str:
    """Return the state of a group in a forked child of rank `rank`, whose process is `pid`."""
    return (
        f"is that of rank {rank}, process {pid}, of which this process is a fork and so no rank; fork before"
        " init_process_group, start the process anew (method 'spawn' of multiprocessing), or call init_process_group"
        " in it, to be a rank of another world"
    )
