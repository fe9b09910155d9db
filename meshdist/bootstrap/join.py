"""Joining and leaving a world through the store.

A store can outlive a world: ranks that destroy and init again meet in the next generation. In each, the first rank sets
the world's size and backend, and every rank stores its card. A rank that cannot take part in the world that it has
joined raises an objection, and then no rank begins.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from meshdist.bootstrap.launched import started_by_meshrun
from meshdist.bootstrap.spawned import exceeds_spawn
from meshdist.errors import DistError, DistStoreError, DistTimeoutError
from meshdist.runtime.departure import Departure, PeerExit
from meshdist.runtime.host_identity import Card, host_id
from meshdist.runtime.peer_monitor import Peers
from meshdist.runtime.rank_text import ranks_text
from meshdist.security.credentials import SECRET_VARIABLE
from meshdist.store import PrefixStore, Store, TCPStore
from meshdist.store.address import endpoint
from meshdist.system.deadline import Deadline, Reminder
from meshdist.system.plurals import counted
from meshdist.system.processes import ProcessWatch

_log = logging.getLogger("meshdist")

_NAMED_REFUSALS = 3
_SLICE_S = 1.0
_LAST_WORDS_S = 5.0
_LATE_S = 0.5  # delay between ranks that were started together
_BEGUN, _OBJECTED = "begun", "objected"


def join(
    store: Store, rank: int, world_size: int, card: Card, deadline: Deadline, backend: str, objection: str | None = None
) -> Store:
    """Wait for all ranks and return the part of the store that belongs to this generation of the world.

    An `objection` says why this rank cannot take part, so that all ranks raise it.

    Raises:
        ValueError: The world sizes or backends differ, this rank has already joined, or a rank objects.
        DistTimeoutError: A rank did not arrive; the message names it.
    """
    where = f"init_process_group (rank {rank} of {world_size})"
    try:
        world = _register(store, rank, world_size, card)
    except _RefusedError as error:
        # The store may end with this rank, and the other ranks read the reason there.
        _see_off(store, error.world, error.world_size, deadline)
        raise ValueError(f"{where}: {error}") from None
    try:
        _agree(world, rank, backend, objection)
        _meet(world, rank, world_size, card, deadline, store)
        _look_for_objections(world)
    except _ObjectedError as error:
        # This rank leaves the generation, so that it may join the next.
        leave(world, rank, world_size, Departure(PeerExit.NOT_BEGUN, detail=str(error)))
        _see_off(store, world, world_size, deadline)
        raise ValueError(f"{where}: {error}") from None
    return world


class _ObjectedError(ValueError):
    """A rank objects."""


class _RefusedError(ValueError):
    """This process is not one of the ranks of `world`."""

    def __init__(self, world: Store, world_size: int, refusal: str) -> None:
        super().__init__(refusal)
        self.world = world
        self.world_size = world_size


def object_to(store: Store, objection: str) -> None:
    """Report to the ranks that wait in `store` why the world cannot begin; each of them raises that.

    For a process of the job that cannot be one of the ranks. A world that has begun is unaffected.
    """
    _object(_current(store), objection)


def _object(world: Store, objection: str) -> bool:
    """Keep the world from beginning; return False if it has begun."""
    world.append("objections", f"{objection}\n")
    return world.compare_set("complete", "", _OBJECTED).decode() == _OBJECTED  # ends the wait of all ranks


def _see_off(store: Store, world: Store, world_size: int, deadline: Deadline) -> None:
    """On the rank that hosts the store, give the ranks that have arrived time to read why they cannot begin."""
    if not isinstance(store, TCPStore) or not store.is_master:
        return
    with suppress(DistStoreError):
        world.wait(["over"], deadline.slice_s(_LATE_S))
        return
    came = [rank for rank in range(world_size) if world.check([f"card/{rank}"])]
    there = [rank for rank in came if not world.check([f"withdrawn/{rank}"])]
    with suppress(DistStoreError):
        world.wait([f"left/{rank}" for rank in there], deadline.slice_s(_LAST_WORDS_S))


def see_off_late(store: Store, world_size: int, limit_s: float) -> None:
    """On the rank that hosts the store, after a timeout, give the ranks that have arrived time to see who is missing.

    They time out at about the same time, and set `told/<rank>` once they no longer need the store.
    """
    with suppress(DistError):
        world = _current(store)
        came = [rank for rank in range(world_size) if world.check([f"card/{rank}"])]
        world.wait([f"told/{rank}" for rank in came if not _card_of_dead(world, rank)], limit_s)


def _agree(world: Store, rank: int, backend: str, objection: str | None) -> None:
    """Compare the backend with that of the first rank; object if it differs or this rank has an objection."""
    agreed, _, other = world.compare_set("backend", "", f"{backend} {rank}").decode().rpartition(" ")
    reasons = [] if objection is None else [f"rank {rank}: {objection}"]
    if agreed != backend:
        reasons.insert(0, f"the backends disagree: rank {other} says {agreed!r}, rank {rank} says {backend!r}")
    if not reasons:
        return
    _object(world, "; ".join(reasons))
    raise _ObjectedError("; ".join(reason.removeprefix(f"rank {rank}: ") for reason in reasons))  # the error has it


def _look_for_objections(world: Store) -> None:
    if world.get("complete").decode() == _OBJECTED:
        raise _ObjectedError("; ".join(world.get("objections").decode().splitlines()))


def _meet(world: Store, rank: int, world_size: int, card: Card, deadline: Deadline, store: Store) -> None:
    """Wait until all ranks have arrived or one objects."""
    if world.add("arrived", 1) == world_size:
        world.compare_set("complete", "", _BEGUN)
    try:
        _await_all(world, rank, world_size, deadline, store)
    except DistStoreError:
        if not _take_back(world, rank, world_size, card):
            world.compare_set("complete", "", _BEGUN)
            return  # the last rank arrived just now
        _pass_on_refusals(world, store, world_size)
        raise _missing(world, rank, world_size, deadline) from None
    except BaseException:
        with suppress(DistError):  # report the interrupt, not that the store is gone too
            _take_back(world, rank, world_size, card)
            world.set(f"told/{rank}", "")
        raise


def _await_all(world: Store, rank: int, world_size: int, deadline: Deadline, store: Store) -> None:
    """Wait for the last rank; pass on the refusals of the store meanwhile, and report now and then who is missing."""
    reminder = Reminder()
    while True:
        try:
            world.wait(["complete"], deadline.slice_s(_SLICE_S))
            return
        except DistStoreError:
            if deadline.expired():
                raise
            _pass_on_refusals(world, store, world_size)
            world.check(["complete"])  # raises if the store is closed, instead of retrying without pause
            waited_s = reminder.due_s()
            # The first of the ranks that are there speaks for all.
            if waited_s is not None and not any(world.check([f"card/{lower}"]) for lower in range(rank)):
                words = _who_came(world, world_size, f"(timeout in {deadline.remaining_s():.0f} s)", is_waiting=True)
                _log.warning(
                    "init_process_group (rank %d of %d) is still waiting after %.0f s: %s%s",
                    *(rank, world_size, waited_s, words, _refused(world)),
                )


def _pass_on_refusals(world: Store, store: Store, world_size: int) -> None:
    """Report the processes that the store refused to all ranks, if this rank hosts it.

    The ranks wait on, since a stranger must not be able to end a job. In a world of several calls of `spawn`, a refused
    process is most likely one of its ranks with a different secret, and all ranks raise an error.
    """
    refused = store.take_refusals() if isinstance(store, TCPStore) else []
    for words in refused:
        world.set(f"turned_away/{world.add('num_turned_away', 1) - 1}", words)
    if refused and exceeds_spawn(world_size):
        _object(world, f"refused {'; '.join(refused[:_NAMED_REFUSALS])}")


def _missing(world: Store, rank: int, world_size: int, deadline: Deadline) -> DistTimeoutError:
    words = _who_came(world, world_size, f"within {deadline.timeout_s:g} s") + _refused(world)
    with suppress(DistError):  # the store may end with its rank, and nothing else is needed from it
        world.set(f"told/{rank}", "")
    return DistTimeoutError(f"init_process_group (rank {rank} of {world_size}): {words}")


def _who_came(world: Store, world_size: int, when: str, *, is_waiting: bool = False) -> str:
    came = [n for n in range(world_size) if world.check([f"card/{n}"])]
    words = shortfall(world, world_size, [n for n in range(world_size) if n not in came], when, is_waiting=is_waiting)
    dead = [
        f"rank {n} (pid {card.pid} on {card.host_name}) arrived, and has since ended"
        for n in came
        if (card := _card_of_dead(world, n))
    ]
    return "; ".join(dead if len(came) == world_size and dead else [words, *dead])


def _card_of_dead(world: Store, rank: int) -> Card | None:
    """Return the card of a rank whose process on this host has ended; None if it lives or that is not known."""
    card = Card.decode(world.get(f"card/{rank}"))
    if card.host != host_id():
        return None
    watch = ProcessWatch(card.pid, card.started)
    try:
        return card if watch.ended() else None
    finally:
        watch.close()


def _refused(world: Store) -> str:
    """Return the refused processes, for the end of a message."""
    keys = [f"turned_away/{number}" for number in range(_NAMED_REFUSALS)]
    return "".join(f"; refused: {world.get(key).decode()}" for key in keys if world.check([key]))


def _take_back(world: Store, rank: int, world_size: int, card: Card) -> bool:
    """Withdraw this rank's arrival, so that it may come again; return False if all have arrived."""
    if world.add("arrived", -1) == world_size - 1:
        world.add("arrived", 1)
        return False
    # Keep the card, so that a rank that gives up at the same time does not report this one as missing.
    world.set(f"withdrawn/{rank}", card.encode())
    return True


def _generation(store: Store, number: int) -> Store:
    return PrefixStore(f"world/{number}", store)


def _current(store: Store) -> Store:
    """Return the part of the store of the first generation that is not over."""
    generation = 0
    while (world := _generation(store, generation)).check(["over"]):
        generation += 1
    return world


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
            f"rank {rank} has already joined (pid {taken.pid} on {taken.host_name}); give each process its own"
            " rank, or a new store if this one is left over from an earlier run"
        )
    with suppress(DistError):  # the store may end when the other ranks have raised the error
        was_in_time = _object(
            world, f"refused pid {card.pid} on {card.host_name} as rank {rank} of {world_size}: {refusal}"
        )
        if was_in_time and taken is None and rank < agreed and Card.decode(_leave_card(world, rank, card)) == card:
            # Otherwise no rank could enter the next generation.
            leave(world, rank, agreed, Departure(PeerExit.NOT_BEGUN, detail=refusal))
    raise _RefusedError(world, agreed, refusal)


def _leave_card(world: Store, rank: int, card: Card) -> bytes:
    """Store the card of the rank; return the stored one, which may be that of a process that came first."""
    taken = world.compare_set(f"card/{rank}", "", card.encode())
    withdrawn = f"withdrawn/{rank}"
    if world.check([withdrawn]) and world.get(withdrawn) == taken:
        with suppress(NotImplementedError):  # of a store of the program's own
            world.delete_key(f"told/{rank}")
        return world.compare_set(f"card/{rank}", taken, card.encode())
    return taken


def leave(world: Store, rank: int, world_size: int, departure: Departure) -> None:
    """Record how this rank has left the world, so that it may join the next generation."""
    say_departure(world, rank, departure)
    if world.add("gone", 1) == world_size:
        world.set("over", "")


def say_departure(world: Store, rank: int, departure: Departure) -> None:
    """Record in the store how this rank leaves the world."""
    world.set(f"left/{rank}", departure.encode())


_KEPT = "kept"
_PART = "shrunk"


def shrunk_store(store: Store, keep: Sequence[int]) -> Store:
    """Return the store of the world that remains of a larger one, and record its ranks for processes that look for it.

    `keep` has the remaining ranks, by their previous numbers, in their new order. Raises DistError if the store is
    gone.
    """
    part = PrefixStore(_PART, store)
    part.set(_KEPT, json.dumps(list(keep)))
    return part


def arrivals(world: Store) -> tuple[list[int], int]:
    """Return the ranks that have come to a world, which a rank has come to, and its size."""
    world_size = int(world.get("world_size"))
    if world.check(["complete"]):
        return list(range(world_size)), world_size
    keys = set(world.list_keys())
    return [rank for rank in range(world_size) if f"card/{rank}" in keys], world_size


def object_for_absent(store: Store, world_size: int, absent: Mapping[int, str]) -> None:
    """Report to ranks that wait in `store` for one that has ended; each of them raises why it will not come.

    `absent` has the reason by rank. A world of a different size, or one that has begun, is unaffected.
    """
    world = _current(store)
    if not world.check(["world_size"]) or int(world.get("world_size")) != world_size or world.check(["complete"]):
        return
    for rank, why in absent.items():
        if not world.check([f"card/{rank}"]):
            _object(world, why)
            return


def worlds_in(store: Store, card: Card) -> list[tuple[Store, Peers]]:
    """Return the world in a store and the worlds it was shrunk to, in order, each with its processes.

    Raises DistError if the store is gone.
    """
    found = [(store, Peers(store, card, int(store.get("world_size"))))]
    while True:
        world, peers = found[-1]
        part = PrefixStore(_PART, world)
        if not part.check([_KEPT]):
            return found
        found.append((part, peers.renumbered(json.loads(part.get(_KEPT)), part)))


def shortfall(store: Store, world_size: int, missing: Sequence[int], when: str, *, is_waiting: bool = False) -> str:
    """Return how many ranks joined, which are missing, and what to check, for the message of a timeout.

    If none are `missing`, all came, but, if the wait is over, some gave up before the others arrived. `when` is as in
    "within 2 s", or, if the wait goes on, as in "(timeout in 2 s)".
    """
    if not missing and is_waiting:
        return f"all {world_size} ranks have arrived, and are about to go on {when}"
    if not missing:
        return f"all {world_size} ranks came {when}, but not at the same time: some gave up before the others arrived"
    there = world_size - len(missing)
    came = f"{there} of {counted(world_size, 'rank')} {joined(there, is_waiting=is_waiting)} {when}"
    if launched := started_by_meshrun(store, missing):
        return f"{came}; {launched}"
    place = _place(store)
    question = "is missing: was it" if len(missing) == 1 else "are missing: were they"
    return f"{came}; {ranks_text(missing)} {question} started with {place}?"


def joined(number: int, *, is_waiting: bool) -> str:
    """Return that `number` ranks joined, as the verb of a sentence about a wait that goes on, or has ended."""
    return ("has joined" if number == 1 else "have joined") if is_waiting else "joined"


def _place(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"this store's address, {endpoint(store.host, store.port)}, and {SECRET_VARIABLE}"
    from meshdist.store import FileStore  # with modules that other jobs do not need

    return "this file" if isinstance(store, FileStore) else "this store"
