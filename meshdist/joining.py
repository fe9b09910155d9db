"""Joining and leaving a world through the store.

A store can outlive a world: ranks that destroy and init again meet in the next generation. In each, the first rank
to come says the world's size, and every rank leaves its card.
"""

from __future__ import annotations

from contextlib import suppress

from meshdist.deadline import Deadline
from meshdist.debug.log import RankLog
from meshdist.errors import DistError, DistStoreError, DistTimeoutError
from meshdist.peers import Card
from meshdist.store import PrefixStore, Store

_log = RankLog()
_NAMED_RANKS = 20
_NAMED_REFUSALS = 3
_SLICE_S = 1.0


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
        _await_all(world, rank, world_size, deadline)
    except DistStoreError:
        if not _take_back(world, rank, world_size, card):
            return world  # the last one came in this very moment
        raise _missing(world, rank, world_size, deadline) from None
    except BaseException:
        with suppress(DistError):  # what interrupts is what the caller is to see, not that the store is gone as well
            _take_back(world, rank, world_size, card)
        raise
    return world


def _await_all(world: Store, rank: int, world_size: int, deadline: Deadline) -> None:
    """Wait for the last rank; rank 0 says in the log who was refused meanwhile."""
    num_warned = 0
    while True:
        try:
            world.wait(["complete"], deadline.slice_s(_SLICE_S))
            return
        except DistStoreError:
            if deadline.expired():
                raise
            # Asked on every rank: a store that is closed says so here, instead of at once, again and again.
            while world.check([f"refused/{num_warned}"]):
                if rank == 0:
                    words = world.get(f"refused/{num_warned}").decode()
                    _log.warning("init_process_group (rank 0 of %d): refused %s", world_size, words)
                num_warned += 1


def _missing(world: Store, rank: int, world_size: int, deadline: Deadline) -> DistTimeoutError:
    missing = [other for other in range(world_size) if not world.check([f"card/{other}"])]
    listed = ", ".join(map(str, missing[:_NAMED_RANKS])) + (", ..." if len(missing) > _NAMED_RANKS else "")
    return DistTimeoutError(
        f"init_process_group (rank {rank} of {world_size}): {world_size - len(missing)} ranks joined within"
        f" {deadline.timeout_s:g} s; missing: {listed}{_refused(world)}"
    )


def _refused(world: Store) -> str:
    """Return who was refused, for the end of a message."""
    keys = [f"refused/{number}" for number in range(_NAMED_REFUSALS)]
    return "".join(f"; refused: {world.get(key).decode()}" for key in keys if world.check([key]))


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
            if taken is None:
                refusal = f"the other ranks say that the world size is {agreed}, this one says {world_size}"
            else:
                refusal = (
                    f"rank {rank} is there already, pid {taken.pid} on {taken.host_name}; give each process a rank of"
                    " its own, or a new store if this one is left over from an earlier run"
                )
            world.set(f"refused/{world.add('num_refused', 1) - 1}", f"pid {card.pid} on {card.host_name}: {refusal}")
            raise ValueError(f"init_process_group (rank {rank} of {world_size}): {refusal}")
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
