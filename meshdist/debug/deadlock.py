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
do (`Waitable.awaits_any`); a `wait_any` by any of the ranks that its calls await. Instead of a circle there is then a
closed set of ranks: one that waits for any of several has confirmed the waits of all of them, each other rank the wait
of one that it awaits, and all these are in the set. Again, suppose that the wait of x is the first of the set to end,
now by a message of y. x has confirmed the wait of y, whoever of the several y is, and that has not ended; so y sends
nothing that x does not have, and what x had of y then was not enough. x may have confirmed the waits at different
times, since each says of its own rank alone what is under way. If one of the several computes, has ended, has left the
group, has other threads or collectives, or has not been confirmed for any other reason, nothing is proven. In a group
of two ranks, any source is the other one. Those of the several that have ended their phase prove nothing either. The
largest closed set is a greatest fixed point: what is left of all blocked ranks, as those are removed for which
something outside could send. In the words of the theory, a circle is a deadlock of the AND model, and a closed set one
of the AND-OR model (E. Knapp: Deadlock detection in distributed databases, ACM Computing Surveys 19 (1987)).

What a rank does while it waits: over shared memory, a recv or a probe reads all that its source sends in the group, or
all its sources, whatever the tag, which ends sends of these ranks (`Waitable.reads_in`), and so does an `irecv`.
Nothing else reads there: a collective, a send, a recv from another rank or in another group, and a rank that has ended
its phase leave the messages of x where they are. So the send of x to y, if it waits until y reads, waits for y unless y
waits for a message of x in the same group, or has posted a receive for one. A rank that waits in a send writes that
message, and others as told below; it ends only waits of the receiver for this rank, and of such a receiver the send
does not wait. On threads, a message is taken as it is sent or as its recv is posted, never in a wait.

A rank that waits for an async call is blocked as well, if the thread that waits has set no limit: until the call is
done, the thread does nothing else. The progress thread then looks in place of the waiting one. That may leave its wait
early by an exception of a signal handler, such as KeyboardInterrupt, while the call goes on: before the thread does
anything else, it marks the wait as ended, as does one that fails (below), and its next wait for the same call has
another number. So has each step of a collective, which may end waits of other ranks as it begins, and each message
that comes before the awaited one in its queue. Who waits for any of several calls, in `wait_any`, waits for ever only
if that is true of each of them: its wait ends by any of the ranks that one of the calls awaits, as a recv from any of
several does. Before it confirms a wait, it looks at all of these calls again, whichever of them the look is for.

Besides the calls that it waits for, a rank may have other messages in progress, unless they have callbacks. Sends are
written meanwhile, so over shared memory they may end a wait of a rank that reads what this one sends: no such rank
confirms the wait of this one while it sends to it (`BlockedRank.sends_to`). Receives read meanwhile, which may end
sends of their sources (`BlockedRank.posted`). No other waits end by that, and over a network both sides count it. As no
message is added before the wait ends, all of them are known when it begins; when one of them ends, the wait gets
another number, since what is left may end fewer waits. A rank that has other collectives in progress is not blocked:
they go on, and may be what another rank waits for. Only those that come after an awaited one in its queue do not begin
before the wait ends.

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

from collections.abc import Collection, Iterable
from itertools import count
from pathlib import PurePath
from time import monotonic
from typing import TYPE_CHECKING

from meshdist.core import Record
from meshdist.debug.blocked_rank import ANY, BlockedRank
from meshdist.debug.blocked_wait import BlockedWait, Surroundings, awaited_ranks, publish_ended
from meshdist.debug.stacks import own_threads
from meshdist.runtime.flight_recorder import facts_in, site_in
from meshdist.runtime.work import in_progress_thread

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
_HARMLESS = (
    "tqdm.", "ipykernel.", "IPython.", "jupyter_core.", "jupyter_client.", "multiprocessing.queues",
    "distributed.process", "distributed.profile", "distributed.utils",
)  # fmt: skip


class DeadlockDetector:
    """Makes the BlockedWaits of one rank; `harmless_threads` are the threads that make no calls of this rank."""

    def __init__(self, world: World, harmless_threads: Collection[int]) -> None:
        self._world = world
        self._harmless_threads = harmless_threads
        self._numbers = count(1)
        self._next_s = 0.0
        self._phase = 0
        self._wait: BlockedWait | None = None  # the last one
        self._awaited: Awaited | None = None  # what makes it one, if it is of async calls
        self._num_calls = 0  # the number of async calls in progress in that wait

    def begin_phase(self, number: int) -> None:
        """Note that this rank begins a phase, which no rank does before all have ended the last."""
        self._phase = number

    def end_phase(self, what: str) -> None:
        """Tell ranks that wait for this one that it has ended its phase, `what`, and makes no call before they have.

        Raises:
            DistError: The store is gone.
        """
        if not (self._world.progress.pending or self._may_do_more()):
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
        heads = [] if awaited is None else awaited.heads()
        waitables = [head.waiting_for for head in heads if head.waiting_for is not None] if is_async else [waitable]
        is_same = awaited is self._awaited and len(self._world.progress.records) == self._num_calls
        goes_on = self._wait is not None and is_same and self._wait.is_for(waitables)
        if wait is None and goes_on and any(one is waitable for one in waitables):  # the first look of this call
            wait = self._wait
        if wait is not None:
            if wait is self._wait and goes_on:
                wait.look()
                return wait
            # The thread has gone on, and perhaps come back, or a call has gone on to its next step, or has ended.
            if not wait.has_ended:
                wait.raise_found()
                wait.end()
            return None
        if len(waitables) < len(heads) or not any(one is waitable for one in waitables):  # no thread waits for it
            return None
        if monotonic() < self._next_s or (self._wait is not None and not self._wait.is_over):
            return None
        self._next_s = monotonic() + _PAUSE_S
        awaits, from_any = awaited_ranks(waitables)
        if not 0 < len(awaits) <= (_MOST_SOURCES if from_any else len(awaits)):
            return None
        for group in self._world.groups:
            group.messages.post_deferred()  # from here on, they are in progress
        records, others = self._calls(awaited)
        if not records or self._may_do_more(awaited):
            return None
        groups = {group.name: group for group in self._world.groups}
        names = [facts_in(record).group for record in records]
        if not groups.keys() >= {*names}:
            return None
        blocked = BlockedRank(
            self._world.rank,
            next(self._numbers),
            awaits if from_any else awaits[:_MOST_AWAITED],
            _words(records[0]),
            members=groups[names[0]].ranks,
            phase=self._phase,
            sends_in=_with_ranks((one.sends_in(), one.awaits()) for one in waitables),
            reads_in=_with_ranks((one.reads_in(), one.awaits() or one.awaits_any()) for one in waitables),
            sends_to=tuple(sorted({*self._receivers(others)}.union(*(one.sends_to() for one in waitables)))),
            posted=self._posted(others),
            from_any=from_any,
            num_others=len(records) - 1,
            instead=next(filter(None, (one.instead() for one in waitables)), ""),
            full_buffer=next(filter(None, (one.full_buffer() for one in waitables)), ""),
        )
        self._awaited, self._num_calls = awaited, len(self._world.progress.records)
        self._wait = BlockedWait(
            blocked, self._surroundings(), waitables, {*names}, lambda rank: self._has_left(names, rank)
        )
        return self._wait

    def leave(self) -> None:
        """Let no rank count on the wait for async calls, as the thread that has waited goes on.

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

    def _calls(self, awaited: Awaited | None) -> tuple[list[Record], list[Record]]:
        """Return the records of the calls in which this rank waits, and of its other messages in progress.

        A thread waits for `awaited`; if that is None, in a sync call. There are no records if a collective is in
        progress that is not in the queue of an awaited one.
        """
        asynchronous = self._world.progress.records
        records = [record for record in self._world.recorder.records() if not record.completed]
        sync = [record for record in records if not any(record is one for one in asynchronous)]
        if len(sync) != (awaited is None):
            return [], []
        mine = sync if awaited is None else [head.record for head in awaited.heads()]
        behind = [] if awaited is None else [record for queue in awaited.queues() for record in queue.records]
        others = [record for record in asynchronous if not any(record is one for one in mine)]
        messages = [record for record in others if facts_in(record).is_message]
        are_known = all(any(record is one for one in (*messages, *behind)) for record in others)
        return (mine, messages) if are_known else ([], [])

    def _receivers(self, messages: Collection[Record]) -> set[int]:
        """Return the global ranks to which messages go."""
        members = {group.name: group.ranks for group in self._world.groups}
        to = [(facts.group, facts.root) for facts in map(facts_in, messages) if facts.sent]
        return {members[group][dst] for group, dst in to if group in members and dst is not None}

    def _posted(self, messages: Collection[Record]) -> tuple[tuple[str, int], ...]:
        """Return the group and the global source of the receives among some messages; see `BlockedRank.posted`."""
        members = {group.name: group.ranks for group in self._world.groups}
        sources = [(facts.group, facts.root) for facts in map(facts_in, messages) if not facts.sent]
        known = {(name, ANY if src is None else members[name][src]) for name, src in sources if name in members}
        return tuple(sorted(known))

    def _has_left(self, names: Collection[str], rank: int) -> bool:
        """Return whether another rank has left one of some groups."""
        return any(group.has_left(rank) for group in self._world.groups if group.name in names and rank in group.ranks)

    def _may_do_more(self, awaited: Awaited | None = None) -> bool:
        """Return whether something else of this rank goes on that may make calls, or complete some.

        Besides the thread that waits for `awaited`, these async calls, and others that have no callbacks.
        """
        world, works = self._world, self._world.progress.pending
        threads = self._harmless_threads if awaited is None else {*self._harmless_threads, awaited.thread}
        mine = () if awaited is None else awaited.works
        return (
            len(works) != len(world.progress.records)
            or len(works) != sum(group.outstanding for group in world.groups)
            or any(work.has_callbacks for work in works if not any(work is one for one in mine))
            or bool(own_threads(threads, _HARMLESS))
        )


def _words(record: Record) -> str:
    facts = facts_in(record)
    kind = "message" if facts.is_message else "call"
    return f"{facts.text}, {kind} {record.sequence} on {facts.label!r}, at {PurePath(site_in(record)[0]).name}"


def _with_ranks(groups: Iterable[tuple[str, Collection[int]]]) -> tuple[tuple[str, int], ...]:
    """Return the pairs of groups, except those without a name, and their awaited ranks."""
    return tuple(sorted({(group, rank) for group, ranks in groups if group for rank in ranks}))
