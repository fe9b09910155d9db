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
rank that waits in a send writes that message, and others as told below; it ends only waits of the receiver for this
rank, and of such a receiver the send does not wait. On threads, a message is taken as it is sent or as its recv is
posted, never in a wait.

A rank that waits for an `irecv` or an `isend` is blocked as well, if that is its only call in progress, and the thread
that waits has set no limit: until the call is done, the thread does nothing else. The progress thread then looks in
place of the waiting one. That may leave its wait early by an exception of a signal handler, such as KeyboardInterrupt,
while the call goes on: before the thread does anything else, it marks the wait as ended, as does one that fails
(below), and its next wait for the same call has another number.

Besides the `isend` that it waits for, other sends may be in progress, unless they have callbacks. They are written
meanwhile, so over shared memory they may end a wait of a rank that reads what this one sends: no such rank confirms the
wait of this one while it sends to it (`BlockedRank.sends_to`). The waits of other ranks, in sends or collectives, do
not end by that. As nothing is added to these sends before the wait ends, all of them are known when it begins. Other
async calls are left out.

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

from collections.abc import Collection, Sequence
from itertools import count
from pathlib import PurePath
from time import monotonic
from typing import TYPE_CHECKING

from meshdist.debug.blocked_rank import BlockedRank
from meshdist.debug.blocked_wait import BlockedWait, Surroundings, publish_ended
from meshdist.debug.stacks import own_threads
from meshdist.runtime.flight_recorder import COMPLETED, SEQUENCE, Record, facts_in, site_in
from meshdist.runtime.work import in_progress_thread

if TYPE_CHECKING:
    from meshdist.groups.world import World
    from meshdist.runtime.progress import Awaited, Job
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
        is_async = in_progress_thread()
        awaited = self._world.progress.awaited if is_async else None
        if wait is not None:
            if awaited is not self._awaited:  # the thread has gone on, and perhaps come back
                wait.raise_found()
                wait.end()
                return None
            wait.look(waitable)
            return wait
        job = None if awaited is None else awaited.queue.first()
        if is_async and (job is None or job.waiting_for is not waitable):  # no thread waits for this call
            return None
        if monotonic() < self._next_s or (self._wait is not None and not self._wait.is_over):
            return None
        self._next_s = monotonic() + _PAUSE_S
        awaits, records = tuple(waitable.awaits())[:_MOST_AWAITED], self._calls()
        record = _awaited_call(awaited, job, records)
        sources = () if awaits else tuple(waitable.awaits_any())
        if not (awaits or 0 < len(sources) <= _MOST_SOURCES) or record is None:
            return None
        if self._may_do_more(awaited, len(records)):
            return None
        group = next((group for group in self._world.groups if group.name == facts_in(record).group), None)
        if group is None:
            return None
        others = [one for one in records if one is not record]
        blocked = BlockedRank(
            self._world.rank,
            next(self._numbers),
            awaits or sources,
            _words(record),
            members=group.ranks,
            phase=self._phase,
            sends_in=waitable.sends_in(),
            reads_in=waitable.reads_in(),
            sends_to=tuple(sorted({*waitable.sends_to(), *self._receivers(others)})),
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

    def _calls(self) -> list[Record]:
        """Return the records of the calls in progress."""
        return [record for record in self._world.recorder.records() if not record[COMPLETED]]

    def _receivers(self, sends: Collection[Record]) -> set[int]:
        """Return the global ranks to which messages go."""
        members = {group.name: group.ranks for group in self._world.groups}
        to = [(facts.group, facts.root) for facts in map(facts_in, sends)]
        return {members[group][dst] for group, dst in to if group in members and dst is not None}

    def _may_do_more(self, awaited: Awaited | None = None, num_calls: int = 1) -> bool:
        """Return whether something else of this rank goes on that may make calls, or complete some.

        Besides the async call `awaited`, the thread that waits for it, and those of `num_calls` without callbacks.
        """
        world, works = self._world, self._world.progress.pending
        num_works = 0 if awaited is None else num_calls
        threads = self._harmless_threads if awaited is None else {*self._harmless_threads, awaited.thread}
        return (
            len(works) != num_works
            or sum(group.outstanding for group in world.groups) != num_works
            or any(work.has_callbacks for work in works if awaited is None or work is not awaited.work)
            or bool(own_threads(threads, _HARMLESS))
        )


def _awaited_call(awaited: Awaited | None, job: Job | None, records: Sequence[Record]) -> Record | None:
    """Return the record of the call in progress in which this rank waits; None if others might end its wait.

    A thread that waits for an async call, which is that of `job`, may wait for a message, or for one of several sends.
    """
    if awaited is None or job is None:
        return records[0] if len(records) == 1 else None
    if job.work is not awaited.work or not any(record is job.record for record in records):
        return None
    facts = [facts_in(record) for record in records]
    are_known = all(one.is_message and (len(facts) == 1 or one.sent) for one in facts)
    return job.record if are_known else None


def _words(record: Record) -> str:
    facts = facts_in(record)
    kind = "message" if facts.is_message else "call"
    return f"{facts.text}, {kind} {record[SEQUENCE]} on {facts.label!r}, at {PurePath(site_in(record)[0]).name}"
