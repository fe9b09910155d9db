"""Joining and leaving a world through the store.

A store can outlive a world: ranks that destroy and init again meet in the next generation. In each, the first rank
to come says the world's size, and every rank leaves its card.
"""

from __future__ import annotations

from meshdist.deadline import Deadline
from meshdist.errors import DistStoreError, DistTimeoutError
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
        missing = [other for other in range(world_size) if not world.check([f"card/{other}"])]
        listed = ", ".join(map(str, missing[:_NAMED_RANKS])) + (", ..." if len(missing) > _NAMED_RANKS else "")
        raise DistTimeoutError(
            f"init_process_group (rank {rank} of {world_size}): {world_size - len(missing)} ranks joined within"
            f" {deadline.timeout_s:g} s; missing: {listed}"
        ) from None
    return world


def _register(store: Store, rank: int, world_size: int, card: Card) -> Store:
    generation = 0
    while True:
        world = PrefixStore(f"world/{generation}", store)
        agreed = int(world.compare_set("world_size", "", str(world_size)))
        taken = Card.decode(world.compare_set(f"card/{rank}", "", card.encode())) if agreed == world_size else None
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


def leave(world: Store, rank: int, world_size: int) -> None:
    """Say that this rank has left the world, so that it may join the next generation."""
    world.set(f"left/{rank}", "")
    if world.add("gone", 1) == world_size:
        world.set("over", "")
