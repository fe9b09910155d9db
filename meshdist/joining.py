"""Joining and leaving a world through the store.

A store can outlive a world: ranks that destroy and init again meet in the next generation. In each, the first rank
to come says the world's size and its backend, and every rank leaves its card. A rank that cannot take part in the world
that it has joined, whatever the others do, objects: then no rank begins.
"""

from __future__ import annotations

from contextlib import suppress

from meshdist.deadline import Deadline
from meshdist.debug.log import RankLog
from meshdist.errors import DistError, DistStoreError, DistTimeoutError
from meshdist.peers import Card
from meshdist.shortfall import shortfall
from meshdist.store import PrefixStore, Store, TCPStore

_log = RankLog()
_NAMED_REFUSALS = 3
_SLICE_S = 1.0
_LAST_WORDS_S = 5.0


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
    world = _register(store, rank, world_size, card)
    try:
        _agree(world, rank, backend, objection)
        _meet(world, rank, world_size, card, deadline, store)
        _look_for_objections(world)
    except _ObjectedError as error:
        # The generation is over for this rank: it may join the next.
        leave(world, rank, world_size, f"did not begin: {error}")
        if isinstance(store, TCPStore) and store.is_master:
            # The store ends with this rank, and the others are to learn there why they cannot begin.
            with suppress(DistStoreError):
                world.wait(["over"], deadline.slice_s(_LAST_WORDS_S))
        raise ValueError(f"init_process_group (rank {rank} of {world_size}): {error}") from None
    return world


class _ObjectedError(ValueError):
    """A rank cannot take part."""


def _agree(world: Store, rank: int, backend: str, objection: str | None) -> None:
    """Compare the backend with that of the first rank that came; tell all ranks of what is in the way."""
    agreed, _, other = world.compare_set("backend", "", f"{backend} {rank}").decode().rpartition(" ")
    reasons = [] if objection is None else [f"rank {rank}: {objection}"]
    if agreed != backend:
        reasons.insert(0, f"the backends disagree: rank {other} says {agreed!r}, rank {rank} says {backend!r}")
    if not reasons:
        return
    objection = "; ".join(reasons)
    world.append("objections", f"{objection}\n")
    world.set("complete", "")  # nobody need wait any longer
    raise _ObjectedError(objection)


def _look_for_objections(world: Store) -> None:
    if world.check(["objections"]):
        raise _ObjectedError("; ".join(world.get("objections").decode().splitlines()))


def _meet(world: Store, rank: int, world_size: int, card: Card, deadline: Deadline, store: Store) -> None:
    """Wait until all ranks are there, or one objects."""
    if world.add("arrived", 1) == world_size:
        world.set("complete", "")
    try:
        _await_all(world, rank, world_size, deadline, store)
    except DistStoreError:
        if not _take_back(world, rank, world_size, card):
            return  # the last one came in this very moment
        _pass_on_refusals(world, store)
        raise _missing(world, rank, world_size, deadline) from None
    except BaseException:
        with suppress(DistError):  # what interrupts is what the caller is to see, not that the store is gone as well
            _take_back(world, rank, world_size, card)
        raise


def _await_all(world: Store, rank: int, world_size: int, deadline: Deadline, store: Store) -> None:
    """Wait for the last rank; rank 0 says in the log who was refused meanwhile."""
    num_warned = 0
    while True:
        try:
            world.wait(["complete"], deadline.slice_s(_SLICE_S))
            return
        except DistStoreError:
            if deadline.expired():
                raise
            _pass_on_refusals(world, store)
            # Asked on every rank: a store that is closed says so here, instead of at once, again and again.
            while world.check([f"refused/{num_warned}"]):
                if rank == 0:
                    words = world.get(f"refused/{num_warned}").decode()
                    _log.warning("init_process_group (rank 0 of %d): refused %s", world_size, words)
                num_warned += 1


def _pass_on_refusals(world: Store, store: Store) -> None:
    """Tell all ranks whom the store turned away, where this rank hosts it; the store itself has logged it."""
    for words in store.take_refusals() if isinstance(store, TCPStore) else ():
        _refuse(world, words, "turned_away")


def _refuse(world: Store, words: str, key: str = "refused") -> None:
    world.set(f"{key}/{world.add(f'num_{key}', 1) - 1}", words)


def _missing(world: Store, rank: int, world_size: int, deadline: Deadline) -> DistTimeoutError:
    missing = [other for other in range(world_size) if not world.check([f"card/{other}"])]
    words = shortfall(world, world_size, missing, f"within {deadline.timeout_s:g} s")
    return DistTimeoutError(f"init_process_group (rank {rank} of {world_size}): {words}{_refused(world)}")


def _refused(world: Store) -> str:
    """Return who was refused, for the end of a message."""
    keys = [f"{key}/{number}" for key in ("refused", "turned_away") for number in range(_NAMED_REFUSALS)]
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
            _refuse(world, f"pid {card.pid} on {card.host_name}: {refusal}")
            raise ValueError(f"init_process_group (rank {rank} of {world_size}): {refusal}")
        generation += 1


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
