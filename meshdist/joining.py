"""Joining and leaving a world through the store.

A store can outlive a world: ranks that destroy and init again meet in the next generation. In each, the first rank
to come says the world's size and its backend, and every rank leaves its card. A rank that cannot take part in the world
that it has joined, whatever the others do, objects: then no rank begins.
"""

from __future__ import annotations

from contextlib import suppress

from meshdist.deadline import Deadline
from meshdist.errors import DistError, DistStoreError, DistTimeoutError
from meshdist.peers import Card
from meshdist.shortfall import shortfall
from meshdist.store import PrefixStore, Store, TCPStore

_NAMED_REFUSALS = 3
_SLICE_S = 1.0
_LAST_WORDS_S = 5.0
_LATE_S = 0.5  # those who were started together come that late, and are told as well
_BEGUN, _OBJECTED = "begun", "objected"


def join(
    store: Store, rank: int, world_size: int, card: Card, deadline: Deadline, backend: str, objection: str | None = None
) -> Store:
    """Meet all ranks and return the part of the store that belongs to this generation of the world.

    Args:
        store: Where they meet.
        rank: This rank.
        world_size: The number of ranks.
        card: How this rank is found.
        deadline: When to give up.
        backend: The backend that this rank names, the same on all ranks.
        objection: Why this rank cannot take part; None where it can.

    Raises:
        ValueError: Another rank said another world size or backend, this rank is there already, or a rank objects.
        DistTimeoutError: Some rank did not come; says which.
    """
    where = f"init_process_group (rank {rank} of {world_size})"
    try:
        world = _register(store, rank, world_size, card)
    except _RefusedError as error:
        # The store may end with this rank, and the others are to learn there why they cannot begin.
        _see_off(store, error.world, error.world_size, deadline)
        raise ValueError(f"{where}: {error}") from None
    try:
        _agree(world, rank, backend, objection)
        _meet(world, rank, world_size, card, deadline, store)
        _look_for_objections(world)
    except _ObjectedError as error:
        # The generation is over for this rank: it may join the next.
        leave(world, rank, world_size, f"did not begin: {error}")
        _see_off(store, world, world_size, deadline)
        raise ValueError(f"{where}: {error}") from None
    return world


class _ObjectedError(ValueError):
    """A rank cannot take part."""


class _RefusedError(ValueError):
    """This process is none of the ranks that meet here: in `world`, of `world_size` ranks."""

    def __init__(self, world: Store, world_size: int, refusal: str) -> None:
        super().__init__(refusal)
        self.world = world
        self.world_size = world_size


def object_to(store: Store, objection: str) -> None:
    """Tell the ranks that wait for the others in `store` why the world cannot begin; each of them raises that.

    For a process of the job that cannot be one of them. A world that has begun goes on.

    Args:
        store: Where they meet, or will.
        objection: The reason, one line.
    """
    generation = 0
    while (world := _generation(store, generation)).check(["over"]):
        generation += 1
    _object(world, objection)


def _object(world: Store, objection: str) -> bool:
    """Keep the world from beginning; return False if it has begun."""
    world.append("objections", f"{objection}\n")
    return world.compare_set("complete", "", _OBJECTED).decode() == _OBJECTED  # nobody need wait any longer


def _see_off(store: Store, world: Store, world_size: int, deadline: Deadline) -> None:
    """On the rank whose store it is, give those who have come the time to read why they cannot begin."""
    if not isinstance(store, TCPStore) or not store.is_master:
        return
    with suppress(DistStoreError):
        world.wait(["over"], deadline.slice_s(_LATE_S))
        return
    came = [rank for rank in range(world_size) if world.check([f"card/{rank}"])]
    there = [rank for rank in came if not world.check([f"withdrawn/{rank}"])]
    with suppress(DistStoreError):
        world.wait([f"left/{rank}" for rank in there], deadline.slice_s(_LAST_WORDS_S))


def _agree(world: Store, rank: int, backend: str, objection: str | None) -> None:
    """Compare the backend with that of the first rank that came; tell all ranks of what is in the way."""
    agreed, _, other = world.compare_set("backend", "", f"{backend} {rank}").decode().rpartition(" ")
    reasons = [] if objection is None else [f"rank {rank}: {objection}"]
    if agreed != backend:
        reasons.insert(0, f"the backends disagree: rank {other} says {agreed!r}, rank {rank} says {backend!r}")
    if not reasons:
        return
    objection = "; ".join(reasons)
    _object(world, objection)
    raise _ObjectedError(objection)


def _look_for_objections(world: Store) -> None:
    if world.get("complete").decode() == _OBJECTED:
        raise _ObjectedError("; ".join(world.get("objections").decode().splitlines()))


def _meet(world: Store, rank: int, world_size: int, card: Card, deadline: Deadline, store: Store) -> None:
    """Wait until all ranks are there, or one objects."""
    if world.add("arrived", 1) == world_size:
        world.compare_set("complete", "", _BEGUN)
    try:
        _await_all(world, deadline, store)
    except DistStoreError:
        if not _take_back(world, rank, world_size, card):
            world.compare_set("complete", "", _BEGUN)
            return  # the last one came in this very moment
        _pass_on_refusals(world, store)
        raise _missing(world, rank, world_size, deadline) from None
    except BaseException:
        with suppress(DistError):  # what interrupts is what the caller is to see, not that the store is gone as well
            _take_back(world, rank, world_size, card)
        raise


def _await_all(world: Store, deadline: Deadline, store: Store) -> None:
    """Wait for the last rank; tell the others whom the store turns away meanwhile."""
    while True:
        try:
            world.wait(["complete"], deadline.slice_s(_SLICE_S))
            return
        except DistStoreError:
            if deadline.expired():
                raise
            _pass_on_refusals(world, store)
            world.check(["complete"])  # a store that is closed says so here, instead of at once, again and again


def _pass_on_refusals(world: Store, store: Store) -> None:
    """Tell all ranks whom the store turned away, where this rank hosts it; the store itself has logged it."""
    for words in store.take_refusals() if isinstance(store, TCPStore) else ():
        world.set(f"turned_away/{world.add('num_turned_away', 1) - 1}", words)


def _missing(world: Store, rank: int, world_size: int, deadline: Deadline) -> DistTimeoutError:
    missing = [other for other in range(world_size) if not world.check([f"card/{other}"])]
    words = shortfall(world, world_size, missing, f"within {deadline.timeout_s:g} s")
    return DistTimeoutError(f"init_process_group (rank {rank} of {world_size}): {words}{_refused(world)}")


def _refused(world: Store) -> str:
    """Return who was refused, for the end of a message."""
    keys = [f"turned_away/{number}" for number in range(_NAMED_REFUSALS)]
    return "".join(f"; refused: {world.get(key).decode()}" for key in keys if world.check([key]))


def _take_back(world: Store, rank: int, world_size: int, card: Card) -> bool:
    """Have this rank count as not arrived, so that it may come again; return False if all have arrived."""
    if world.add("arrived", -1) == world_size - 1:
        world.add("arrived", 1)
        return False
    # The card stays: who gives up in the same moment shall not call this rank missing.
    world.set(f"withdrawn/{rank}", card.encode())
    return True


def _generation(store: Store, number: int) -> Store:
    return PrefixStore(f"world/{number}", store)


def _register(store: Store, rank: int, world_size: int, card: Card) -> Store:
    generation = 0
    while True:
        world = _generation(store, generation)
        agreed = int(world.compare_set("world_size", "", str(world_size)))
        taken = Card.decode(_leave_card(world, rank, card)) if agreed == world_size else None
        if taken == card:
            return world
        if not world.check(["over" if taken is None else f"left/{rank}"]):
            break
        generation += 1
    if taken is None:
        refusal = f"the other ranks say that the world size is {agreed}, this one says {world_size}"
    else:
        refusal = (
            f"rank {rank} is there already, pid {taken.pid} on {taken.host_name}; give each process a rank of"
            " its own, or a new store if this one is left over from an earlier run"
        )
    with suppress(DistError):  # the others raise as they hear of it, and the store may go with them
        was_in_time = _object(
            world, f"refused pid {card.pid} on {card.host_name}, rank {rank} of {world_size}: {refusal}"
        )
        if was_in_time and taken is None and rank < agreed and Card.decode(_leave_card(world, rank, card)) == card:
            leave(world, rank, agreed, f"did not begin: {refusal}")  # or nobody could meet in the next generation
    raise _RefusedError(world, agreed, refusal)


def _leave_card(world: Store, rank: int, card: Card) -> bytes:
    """Return the card that is there for the rank: this one, or that of another process, which came first."""
    taken = world.compare_set(f"card/{rank}", "", card.encode())
    withdrawn = f"withdrawn/{rank}"
    if world.check([withdrawn]) and world.get(withdrawn) == taken:
        return world.compare_set(f"card/{rank}", taken, card.encode())
    return taken


def leave(world: Store, rank: int, world_size: int, farewell: str) -> None:
    """Say that this rank has left the world, and how, so that it may join the next generation."""
    say_farewell(world, rank, farewell)
    if world.add("gone", 1) == world_size:
        world.set("over", "")


def say_farewell(world: Store, rank: int, farewell: str) -> None:
    """Say how this rank leaves the world, to those who ask the store."""
    world.set(f"left/{rank}", farewell)
