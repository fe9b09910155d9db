"""Joining and leaving a world through the store.

A store can outlive a world: ranks that destroy and init again meet in the next generation. In each, the first rank
to come says the world's size, and every rank leaves its card.
"""

from __future__ import annotations

from contextlib import suppress

from meshdist.deadline import Deadline
from meshdist.errors import DistError, DistStoreError, DistTimeoutError
from meshdist.peers import Card
from meshdist.store import PrefixStore, Store

_NAMED_RANKS = 20


def join(store: Store, rank: int, world_size: int, card: Card, deadline: Deadline) -> Store:
    """Meet all ranks and return the part of the store that belongs to this generation of the world.

    Raises:
        ValueError: Another rank said another world size, or this rank is there already.
        DistTimeoutError: Some rank did not come; says which.
    """
    world = _register(store, rank, world_size, card)
    if world.add("arrived", 1) == world_size:
        world.set("complete", "")
    try:
        world.wait(["complete"], deadline.remaining_s())
    except DistStoreError:
        if not _take_back(world, rank, world_size, card):
            return world  # the last one came in this very moment
        raise _missing(world, rank, world_size, deadline) from None
    except BaseException:
        with suppress(DistError):  # what interrupts is what the caller is to see, not that the store is gone as well
            _take_back(world, rank, world_size, card)
        raise
    return world


def _missing(world: Store, rank: int, world_size: int, deadline: Deadline) -> DistTimeoutError:
    missing = [other for other in range(world_size) if not world.check([f"card/{other}"])]
    listed = ", ".join(map(str, missing[:_NAMED_RANKS])) + (", ..." if len(missing) > _NAMED_RANKS else "")
    return DistTimeoutError(
        f"init_process_group (rank {rank} of {world_size}): {world_size - len(missing)} ranks joined within"
        f" {deadline.timeout_s:g} s; missing: {listed}"
    )


def _take_back(world: Store, rank: int, world_size: int, card: Card) -> bool:
    """Have this rank count as not arrived, so that it may come again; return False if all have arrived."""
    if world.add("arrived", -1) == world_size - 1:
        world.add("arrived", 1)
        return False
    # The card stays: who gives up in the same moment shall not call this rank missing.
    world.set(f"withdrawn/{rank}", card.encode())
    return True


def _register(store: Store, rank: int, world_size: int, card: Card) -> Store:
    generation = 0
    while True:
        world = PrefixStore(f"world/{generation}", store)
        agreed = int(world.compare_set("world_size", "", str(world_size)))
        taken = Card.decode(_leave_card(world, rank, card)) if agreed == world_size else None
        if taken == card:
            return world
        if not world.check(["over" if taken is None else f"left/{rank}"]):
            where = f"init_process_group (rank {rank} of {world_size})"
            if taken is None:
                raise ValueError(
                    f"{where}: the other ranks say that the world size is {agreed}, this one says {world_size}"
                )
            raise ValueError(
                f"{where}: rank {rank} is there already, pid {taken.pid} on {taken.host_name}; give each process"
                " a rank of its own, or a new store if this one is left over from an earlier run"
            )
        generation += 1


def _leave_card(world: Store, rank: int, card: Card) -> bytes:
    """Return the card that is there for the rank: this one, or that of another process, which came first."""
    taken = world.compare_set(f"card/{rank}", "", card.encode())
    withdrawn = f"withdrawn/{rank}"
    if world.check([withdrawn]) and world.get(withdrawn) == taken:
        return world.compare_set(f"card/{rank}", taken, card.encode())
    return taken


def leave(world: Store, rank: int, world_size: int) -> None:
    """Say that this rank has left the world, so that it may join the next generation."""
    world.set(f"left/{rank}", "")
    if world.add("gone", 1) == world_size:
        world.set("over", "")
