"""DeadlockDetector: proves that ranks wait for each other, so that they raise long before the timeout.

A rank that has waited for a second in a sync call, and does nothing else meanwhile, is blocked: only the awaited
ranks can end its wait. It publishes that as a BlockedRank, with the number of the wait, and reads what they have
published. If its wait then still goes on, it publishes the numbers of their waits as well: it has `confirmed` them.

Ranks of which each has confirmed the wait of the next, in a circle, wait for ever. Suppose that some of these waits
end, and that the wait of x is the first. It ends by something that the next rank, y, does. While y waits, it does
nothing that ends the wait of x (see below), and its wait has not ended. What y did before it published its wait was
there when x, having read of that wait, looked again, and was not enough. So none of these waits ends. For that, a
`Waitable` names in `awaits` only ranks that must do something in a call of theirs. What they do is seen at once, as in
shared memory, or is counted on both sides: over TCP and MPI, y publishes with its wait how much it has sent and
received, and x confirms the wait only if nothing was under way between the two in either direction;
`runtime.message_counts` says why nothing follows. Besides, y must not have left the group of x's call, which x might
learn later.

A recv or a probe from any of several ranks ends by a message of one of them, so it waits for ever only if all of them
do (`Waitable.awaits_any`). Instead of a circle there is then a closed set of ranks: one that waits for any of several
has confirmed the waits of all of them, each other rank the wait of one that it awaits, and all these are in the set.
Again, suppose that the wait of x is the first of the set to end, now by a message of y. x has confirmed the wait of y,
whoever of the several y is, and that has not ended; so y sends nothing that x does not have, and what x had of y then
was not enough. x may have confirmed the waits at different times, since each says of its own rank alone what is under
way. If one of the several computes, has ended, has left the group, has other threads or async calls, or has not been
confirmed for any other reason, nothing is proven. In a group of two ranks, any source is the other one. Those of the
several that have ended their phase prove nothing either. The largest closed set is a greatest fixed point: what is left
of all blocked ranks, as those are removed for which something outside could send. In the words of the theory, a circle
is a deadlock of the AND model, and a closed set one of the AND-OR model (E. Knapp: Deadlock detection in distributed
databases, ACM Computing Surveys 19 (1987)).

What a rank does while it waits: over shared memory, a recv or a probe reads all that its source sends in the group, or
all its sources, whatever the tag, which ends sends of these ranks (`Waitable.reads_in`). Nothing else reads there but
an `irecv`, and a rank with one is not blocked unless it waits for that alone, as in a recv; a collective, a send, a
recv from another rank or in another group, and a rank that has ended its phase leave the messages of x where they are.
So the send of x to y, if it waits until y reads, waits for y unless y waits for a message of x in the same group. A
rank that waits in a send writes that message and no other, or it is not blocked; it ends only waits of the receiver for
this rank, and of such a receiver the send does not wait. On threads, a message is taken as it is sent or as its recv is
posted, never in a wait.

A rank that waits for an `irecv` is blocked as well, if that is its only call in progress, and the thread that waits
has set no limit: until the call is done, the thread does nothing else. The progress thread then looks in place of the
waiting one. That may leave its wait early by an exception of a signal handler, such as KeyboardInterrupt, while the
call goes on: before the thread does anything else, it marks the wait as ended, as does one that fails (below), and its
next wait for the same call has another number. Other async calls are left out.

A wait may also end by its timeout or by the failure of a rank outside of the circle. So a circle, or a closed set, must
be claimed: the rank that finds it marks every wait of it in the store, in one step each, and a rank whose wait fails
marks that wait as ended. If a wait of the circle has ended, no rank raises the circle; if the circle was first, the
rank raises it, too.

A program may have phases, as a notebook has cells: none begins before all ranks have ended the last. A rank that has
ended its phase does nothing for those that have not, so a rank waits for ever that has confirmed that, directly or by
way of blocked ranks.

The proof uses no clock and no state of two ranks at one time. The second only keeps short waits free of its cost:
a thread, and some requests to the store.

The circles are found by following their edges, as in K. M. Chandy, J. Misra, L. M. Haas: Distributed deadlock
detection, ACM Transactions on Computer Systems 1 (1983), for processes that wait for all of several others (there: the
resource model). There, a probe visits the ranks; here, each rank reads in the store what those have published that it
waits for, and follows what these have confirmed. A rank publishes its wait once, and again if it has confirmed others
or its traffic has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from itertools import count
from pathlib import PurePath
from time import monotonic
from typing import TYPE_CHECKING

from meshdist.debug.blocked_rank import BlockedRank
from meshdist.debug.blocked_wait import BlockedWait, Surroundings, publish_ended
from meshdist.debug.stacks import own_threads
from meshdist.runtime.flight_recorder import COMPLETED, SEQUENCE, Record, facts_in, site_in
from meshdist.runtime.work import ProgressThread

if TYPE_CHECKING:
    from meshdist.groups.world import World
    from meshdist.runtime.progress import Awaited
    from meshdist.runtime.waiting import Waitable

# How long a thread that goes on without its async call waits for the store.
_LEAVING_S = 1.0
# Between the first looks at two waits.
_PAUSE_S = 0.2
# Awaited ranks that are asked about: a circle goes through any of them.
_MOST_AWAITED = 16
# Ranks of which any may send: all of them are asked about, or none.
_MOST_SOURCES = 128
# Threads of libraries that make no calls.
_HARMLESS = ("tqdm.", "ipykernel.", "IPython.", "jupyter_core.", "jupyter_client.")


class DeadlockDetector:
    """Makes the BlockedWaits of one rank; `harmless_threads` are the threads that make no calls of this rank."""

    def __init__(self, world: World, harmless_threads: Collection[int]) -> None:
        self._world = world
        self._harmless_threads = harmless_threads
        self._numbers = count(1)
        self._next_s = 0.0
        self._phase = 0
        self._wait: BlockedWait | None = None  # the last one
        self._awaited: Awaited | None = None  # what makes it one, if it is of an async call

    def begin_phase(self, number: int) -> None:
        """Note that this rank begins a phase, which no rank does before all have ended the last."""
        self._phase = number

    def end_phase(self, what: str) -> None:
        """Tell ranks that wait for this one that it has ended its phase, `what`, and makes no call before they have.

        Raises:
            DistError: The store is gone.
        """
        if not self._may_do_more():
            ended = BlockedRank(self._world.rank, next(self._numbers), (), what, phase=self._phase, has_ended=True)
            publish_ended(ended, self._surroundings())

    def look(self, wait: BlockedWait | None, waitable: Waitable) -> BlockedWait | None:
        """Look at the wait of this thread, which has just found that it goes on.

        `wait` is the result of the last look at it; its `end` must be called.

        Raises:
            DistBackendError: This rank is in a circle or a closed set of blocked ranks.
        """
        is_async = isinstance(threading.current_thread(), ProgressThread)
        awaited = self._world.progress.awaited if is_async else None
        if wait is not None:
            if awaited is not self._awaited:  # the thread has gone on, and perhaps come back
                wait.raise_found()
                wait.end()
                return None
            wait.look(waitable)
            return wait
        if monotonic() < self._next_s or (is_async and awaited is None):
            return None
        self._next_s = monotonic() + _PAUSE_S
        awaits, record = tuple(waitable.awaits())[:_MOST_AWAITED], self._only_call()
        sources = () if awaits else tuple(waitable.awaits_any())
        if not (awaits or 0 < len(sources) <= _MOST_SOURCES) or record is None or self._may_do_more(awaited):
            return None
        if awaited is not None and not _is_only_receive(awaited, record):
            return None
        group = next((group for group in self._world.groups if group.name == facts_in(record).group), None)
        if group is None:
            return None
        blocked = BlockedRank(
            self._world.rank,
            next(self._numbers),
            awaits or sources,
            _words(record),
            members=group.ranks,
            phase=self._phase,
            sends_in=waitable.sends_in(),
            reads_in=waitable.reads_in(),
            from_any=bool(sources),
            instead=waitable.instead(),
        )
        self._awaited = awaited
        self._wait = BlockedWait(blocked, self._surroundings(), group.name, group.has_left)
        return self._wait

    def leave(self) -> None:
        """Let no rank count on the wait for an async call, as the thread that has waited goes on without it.

        If this comes between the first look and the assignment of the wait, that is not withdrawn. But then the next
        look ends it, before it confirms anything, and a wait that has confirmed none is in no circle.
        """
        if self._wait is not None and self._awaited is not None:
            self._wait.withdraw(_LEAVING_S)

    def close(self, longest_s: float) -> None:
        """Wait for the thread of the last wait, which has ended."""
        if self._wait is not None:
            self._wait.join(longest_s)

    def _surroundings(self) -> Surroundings:
        world = self._world
        return Surroundings(world.store, world.log, world.size, world.peers.traffic)

    def _only_call(self) -> Record | None:
        """Return the record of the call in progress; None if there are others."""
        in_progress = [record for record in self._world.recorder.records() if not record[COMPLETED]]
        return in_progress[0] if len(in_progress) == 1 else None

    def _may_do_more(self, awaited: Awaited | None = None) -> bool:
        """Return whether something else of this rank goes on that may make calls, or complete some.

        Besides the async call `awaited`, and the thread that waits for it.
        """
        world = self._world
        works = [] if awaited is None else [awaited.work]
        threads = self._harmless_threads if awaited is None else {*self._harmless_threads, awaited.thread}
        return (
            world.progress.pending != works
            or sum(group.outstanding for group in world.groups) != len(works)
            or bool(own_threads(threads, _HARMLESS))
        )


def _is_only_receive(awaited: Awaited, record: Record) -> bool:
    """Return whether the only call in progress is an `irecv`, for which a thread waits."""
    job = awaited.queue.first()
    facts = facts_in(record)
    is_receive = facts.is_message and bool(facts.received)
    return is_receive and job is not None and job.work is awaited.work and job.record is record


def _words(record: Record) -> str:
    facts = facts_in(record)
    kind = "message" if facts.is_message else "call"
    return f"{facts.text}, {kind} {record[SEQUENCE]} on {facts.label!r}, at {PurePath(site_in(record)[0]).name}"
