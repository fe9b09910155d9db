"""Forks: a process that was forked of a rank has all that the rank has, and is none.

It has the rank's memory, sockets and place in the groups, but not its threads, and the others know nothing of it. What
it said would be the rank's word, and what it did not say would be waited for. So it finds no world: its calls raise,
its end is nobody's, and it gives back at once what would have the others believe that the rank still lives.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdist.current import WorldSlot


def orphan_forks(slot: WorldSlot) -> None:
    """Have processes that are forked of this one find no world in `slot`, where this one has one; for ever."""
    if slot.orphans_forks or not hasattr(os, "register_at_fork"):
        return
    slot.orphans_forks = True
    known = weakref.ref(slot)

    def in_child() -> None:
        slot = known()
        world = None if slot is None else slot.world
        if slot is not None and world is not None:
            slot.world, slot.orphaned = None, is_of_parent(world.rank, world.card.pid)
            world.disown(slot.orphaned)

    os.register_at_fork(after_in_child=in_child)


def is_of_parent(rank: int, pid: int) -> str:
    """Return what became of a group in a process that was forked of a rank.

    Example:
        >>> is_of_parent(1, 4711).partition("; ")[0]
        'is that of rank 1, process 4711, of which this process is a fork and so no rank'
    """
    return (
        f"is that of rank {rank}, process {pid}, of which this process is a fork and so no rank; fork before"
        " init_process_group, start the process anew (method 'spawn' of multiprocessing), or call init_process_group"
        " in it, to be a rank of another world"
    )
