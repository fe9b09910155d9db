"""Progress of async calls: those of one group are carried out in the order in which they were made.

A thread that waits for a call carries out this rank's calls itself for the moment in which most of them end (`carry`).
What takes longer, or nobody waits for, is left to the progress thread. Each rank has one, started by the first async
call. It advances the head of every queue that is ready, so queues do not wait for each other.

The core does the same for calls of one step that were made before: see `PlannedWork`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from time import monotonic
from typing import NamedTuple

from meshdist import core
from meshdist.core import Record
from meshdist.errors import DistError, DistTimeoutError
from meshdist.runtime.flight_recorder import clock
from meshdist.runtime.job import Job
from meshdist.runtime.waiting import (
    EXPLAINED_FROM_S,
    LONGEST_POLL_INTERVAL_S,
    Doorbell,
    Doorbells,
    WaitObserver,
    Watch,
    grace_s,
    wait_any,
)
from meshdist.runtime.work import PlannedWork, ProgressThread, Work, not_yet
from meshdist.system.deadline import Deadline
from meshdist.system.platform import let_others_run, start_thread

# How often the thread checks all queues before it sleeps; some tens of microseconds. It yields the processor after each
# check, to a peer on the same core and to the caller's computation.
SPINS = 50
# How long a wait carries out calls itself.
CARRY_S = 0.001
# After a call the thread naps so long between two looks, for some time; it takes up calls that are older than this. So
# calls that are waited for at once do not wake it, which would take longer than most of them.
NAP_S, _DUE_NS, _NAPS = 0.0005, 250_000, 60
# From so many outstanding calls on, a thread that waits takes them over from the progress thread, since handing each to
# the other thread takes longer than the call.
_TAKEN_OVER = 8
# The argument of an `acquire` that does not block.
_AT_ONCE = (False,)


class Awaited(NamedTuple):
    """A wait for async calls. Without a limit, its thread does nothing else until one is done, or it leaves.

    It leaves by an exception of a signal handler, such as KeyboardInterrupt.
    """

    works: tuple[Work, ...]
    thread: int
    since_ns: int

    def queues(self) -> list[JobQueue]:
        return list({queue for work in self.works if isinstance(queue := work.queue, JobQueue)})

    def heads(self) -> list[Job]:
        """Return the calls of which one ends before any of `works` does: the first of their queues.

        There are none if one of the works is done, or its calls are not known.
        """
        heads: list[Job] = []
        for work in self.works:
            queue = work.queue
            head = queue.first() if isinstance(queue, JobQueue) else None
            if head is None or work._is_done:
                return []
            if head not in heads:
                heads.append(head)
        return heads


class JobQueue:
    """Calls that are carried out one after another.

    Attributes:
        jobs: Those that are not done; a PlannedWork of the core has no Job before it needs one.
        carrier: Held by the thread that carries them out.
        completing: The work of the call that has been carried out last, until its callbacks have run.
        active: Whether the progress thread has it in its list.
        wanted: Whether a thread that waits carries out the calls; the progress thread leaves them to it.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.jobs: deque[Job | PlannedWork] = deque()
        self.carrier = core.TryLock()
        self.completing: Work | None = None
        self.active = self.wanted = False

    def carry(self, work: Work) -> None:
        """Carry out calls on this thread until `work` is done, but only for a moment."""
        self.progress.carry(self, work)

    def activate(self) -> None:
        """Have the progress thread look at the queue, which has got a call."""
        self.progress.activate(self)

    def hasten(self) -> None:
        """Have the progress thread carry out calls now, and not after it has left them to waiting threads."""
        self.progress.hasten()

    def wait_for(self, work: Work, error_prefix: str, limit_s: float) -> None:
        """Block until `work` is done or has failed; after `limit_s` raise DistTimeoutError with the missing ranks."""
        deadline = Deadline(limit_s)
        patience = grace_s(limit_s) if limit_s >= EXPLAINED_FROM_S else limit_s
        if work.done_within(patience, error_prefix):
            return
        with self._watched(error_prefix, deadline) as watch:
            if work.done_within(deadline.remaining_s(), error_prefix):
                return
            cause = self.cause_of_delay(work)
            hang_report = watch.hang_report() if watch is not None else ""
            raise DistTimeoutError(not_yet(limit_s, cause), error_prefix=error_prefix, hang_report=hang_report)

    def await_done(self, work: Work, error_prefix: str) -> None:
        """Block until `work` is done or has failed; meanwhile, observers know that this thread does nothing else."""
        with self.awaiting([work]):
            work.await_done(None, error_prefix)

    @contextmanager
    def awaiting(self, works: Sequence[Work], *, is_limited: bool = False) -> Iterator[None]:
        """Let observers know that this thread does nothing else until one of `works` is done or has failed."""
        progress, mine = self.progress, Awaited(tuple(works), threading.get_ident(), clock())
        is_free = progress.awaited is None or any(work._is_done for work in progress.awaited.works)
        # Callbacks may make calls.
        is_blocked = is_free and not is_limited and not any(work.has_callbacks for work in works)
        try:
            progress.waiting[mine.thread] = mine
            if is_blocked:
                progress.awaited = mine
            yield
        finally:
            progress.waiting.pop(mine.thread, None)
            if is_blocked:
                progress.awaited = None
                if progress.observer is not None:
                    progress.observer.leave()

    @contextmanager
    def _watched(self, error_prefix: str, deadline: Deadline) -> Iterator[Watch | None]:
        observer, job, watch = self.progress.observer, self.first(), None
        waitable = None if job is None else job.waiting_for
        if observer is not None and waitable is not None and deadline.timeout_s >= EXPLAINED_FROM_S:
            watch = observer.look(None, error_prefix, deadline, waitable)
        try:
            yield watch
        finally:
            if watch is not None:
                watch.end()

    @property
    def records(self) -> list[Record]:
        """The records of the calls that are in progress."""
        return [job.record for job in list(self.jobs)]

    def cause_of_delay(self, work: Work) -> str:
        job = self.first()
        missing = "" if job is None or job.waiting_for is None else job.waiting_for.missing()
        if job is None or not missing:
            return ""
        return (
            f", waiting for {missing}"
            if job.work is work
            else f", as it comes after {job.error_prefix}, waiting for {missing}"
        )

    def first(self) -> Job | None:
        """Return the call that is carried out next, or now."""
        try:
            return self.jobs[0].job()
        except IndexError:  # it was completed just now
            return None

    def head(self) -> Job | PlannedWork | None:
        """Return the entry of that call."""
        try:
            return self.jobs[0]
        except IndexError:
            return None


class Progress:
    """The progress thread of one rank."""

    def __init__(self, bells: Doorbells, name: str) -> None:
        self.observer: WaitObserver | None = None
        self.awaited: Awaited | None = None  # what a thread waits for; one of the waits if there are several
        self.waiting: dict[int, Awaited] = {}  # all waits for async calls, by thread, for reports
        self._bells = bells
        self._name = name
        self._lock = threading.Lock()
        # Replaced, never changed: the thread iterates over it without the lock.
        self._active: tuple[JobQueue, ...] = ()
        self._asleep_on: Doorbell | None = None
        self._thread: ProgressThread | None = None
        self._stopping = self._has_started = False
        self._is_napping = self._is_urgent = False
        # The works that threads wait for and carry out: meanwhile the progress thread takes up no other calls.
        self._carried: set[Work] = set()
        # Released to end a nap early; at all other times it is held.
        self._nap = threading.Lock()
        self._nap.acquire()

    def submit(self, queue: JobQueue, job: Job) -> None:
        job.work.queue = queue
        queue.jobs.append(job)
        # The thread removes a queue from its list and then checks again for jobs. So either the thread sees this job,
        # or this method sees that the queue was removed.
        if not queue.active:
            self.activate(queue)

    def carry(self, queue: JobQueue, work: Work) -> None:
        """Carry out calls of all queues on this thread until `work`, in `queue`, is done, but only for a moment.

        A peer may need a call of another queue before it makes the one that this thread waits for.
        """
        end_s = 0.0
        try:
            # Few calls are left to the progress thread if it has begun: Ctrl-C in this thread then disturbs none of
            # them.
            queue.wanted = len(queue.jobs) >= _TAKEN_OVER
            if queue.wanted and queue.carrier.locked():
                self._wake()  # the progress thread sleeps until a peer comes
            self._carried.add(work)
            while not work.is_completed() and (queue.wanted or not queue.carrier.locked()):
                moved = [self._carry_one(other) for other in self._active]
                if any(moved):
                    continue
                let_others_run()
                now_s = monotonic()
                end_s = end_s or now_s + CARRY_S
                if now_s > end_s:
                    break
        finally:
            queue.wanted = False
            self._carried.discard(work)
        if not work.is_completed():
            self.take_up([queue])
            self.hasten()

    def hasten(self) -> None:
        """Have the thread take up all calls now."""
        self._is_urgent = True
        if self._is_napping:
            with suppress(RuntimeError):  # another thread has released it
                self._nap.release()
        self._wake()

    def _carry_one(self, queue: JobQueue) -> bool:
        # Advance the head of a queue; return whether it is done. Ctrl-C may come anywhere: the call stays in the queue,
        # for the next thread that looks there.
        if not queue.jobs:
            return False
        job: Job | None = None
        # Acquires and remembers it in one step: a KeyboardInterrupt comes before or after that.
        is_mine: list[bool] = []
        try:
            is_mine.extend(map(queue.carrier.acquire, _AT_ONCE))
            entry = queue.head() if is_mine[0] else None
            # Callbacks are for the progress thread: they may make calls.
            if entry is None or entry.work.has_callbacks:
                return False
            if not entry.work._is_done:
                job = entry.job()
                if not job.advance(check=False):
                    return False
                job.settle()
            if not entry.work.has_callbacks:
                queue.jobs.popleft()
        finally:
            if is_mine and is_mine[0]:
                queue.carrier.release()
        if job is not None and isinstance(job.error, KeyboardInterrupt):
            raise job.error
        return True

    def drain(self, queue: JobQueue) -> None:
        """Wait until the calls of a queue are done or have failed; each has its deadline."""
        for work in self.take_up([queue]):
            work.await_done(None, "draining a group")

    def take_up(self, queues: Sequence[JobQueue]) -> list[Work]:
        """Have the thread know of all calls in the queues, and return their works.

        Ctrl-C may have come right after one was appended.
        """
        for queue in queues:
            if queue.jobs and not queue.active:
                self.activate(queue)
        return self.works(queues)

    def works(self, queues: Sequence[JobQueue]) -> list[Work]:
        """Return the works of the calls in the queues, and of the call that is being completed."""
        works = [job.work for queue in queues for job in list(queue.jobs)]
        return works + [queue.completing for queue in queues if queue.completing is not None]

    @property
    def pending(self) -> list[Work]:
        """The works of the calls that are in progress, or whose callbacks run."""
        return self.works(list(self._active))

    @property
    def records(self) -> list[Record]:
        """The records of the calls that are in progress."""
        return [record for queue in self._active for record in queue.records]

    def close(self) -> None:
        """Stop the thread; the queues must be empty."""
        self._stopping = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake()
            while thread.is_alive():
                thread.join(LONGEST_POLL_INTERVAL_S)

    def disown(self, what: str) -> None:
        """In a forked child, which has no progress thread: fail the calls in progress with `what`."""
        for work in self.works([*self._active]):
            work.complete(DistError(what))

    def activate(self, queue: JobQueue) -> None:
        """Take a queue into the list; start or wake the thread."""
        with self._lock:
            if not self._has_started:
                # Callbacks run on this thread and need the context, which has the world of a rank that is a thread.
                self._thread = ProgressThread(
                    target=copy_context().run, args=(self._run,), name=self._name, daemon=True
                )
                try:
                    start_thread(self._thread)
                except DistError:
                    self._thread = None
                    queue.jobs.clear()
                    raise
                # Ctrl-C in `start` may leave a thread that never runs. Then the next call makes another, and this one
                # ends if it runs after all.
                self._has_started = True
            if not queue.active:  # last: no later call would start the thread
                queue.active = True
                self._active = (*self._active, queue)
        if not self._is_napping:
            self._wake()

    def _wake(self) -> None:
        bell = self._asleep_on
        if bell is not None:
            bell.ring()

    def _run(self) -> None:
        bell = self._bells.mine()
        mine: list[JobQueue] = []  # what this thread carries out
        spins = naps = 0
        while not self._stopping and self._thread is threading.current_thread():
            queues = self._active
            self._take_up(queues, mine)
            last_spin = spins >= SPINS
            moved = [self._advance(queue, last_spin) for queue in mine]
            mine = [queue for queue in mine if not self._let_go(queue)]
            if any(moved):
                spins = naps = 0
            elif mine and not last_spin:
                spins += 1 + len(mine)
                let_others_run()
            elif mine:
                self._sleep(bell, queues, mine)
            elif queues or naps < _NAPS:
                naps = 0 if queues else naps + 1
                self._is_napping = True
                if not self._is_urgent:
                    self._nap.acquire(True, NAP_S)
                self._is_napping = False
            else:
                self._sleep(bell, queues, mine)
        for queue in mine:
            queue.carrier.release()

    def _take_up(self, queues: tuple[JobQueue, ...], mine: list[JobQueue]) -> None:
        # Calls that somebody waits for, or that nobody has waited for in their first moments.
        is_urgent, self._is_urgent = self._is_urgent, False
        due_ns = clock() - _DUE_NS
        for queue in queues:
            if queue in mine or queue.wanted:
                continue
            entry = queue.head()
            if entry is None:
                self._deactivate(queue)
            elif (is_urgent or self._is_due(entry, due_ns)) and queue.carrier.acquire(False):
                mine.append(queue)

    def _is_due(self, entry: Job | PlannedWork, due_ns: int) -> bool:
        return entry.work.has_callbacks or (entry.record.created < due_ns and not self._carried)

    def _let_go(self, queue: JobQueue) -> bool:
        # Whether all calls of a queue are done, or another thread carries them out.
        if queue.jobs and not queue.wanted:
            return False
        queue.carrier.release()
        return True

    def _advance(self, queue: JobQueue, check: bool) -> bool:
        jobs = queue.jobs
        moved = False
        while jobs and not queue.wanted:
            entry = jobs[0]
            if entry.work._is_done:  # a thread has carried it out that was interrupted, or leaves callbacks to this one
                jobs.popleft()
                entry.work.run_callbacks()
                continue
            job = entry.job()
            if not job.advance(check, self.observer):
                return moved
            moved = True
            # A waiting thread may make its next call at once, which must find the queue without this job.
            queue.completing = job.work
            jobs.popleft()
            job.settle()
            job.work.run_callbacks()
            del job, entry
            queue.completing = None  # release the arrays of the call
        return moved

    def _deactivate(self, queue: JobQueue) -> None:
        with self._lock:
            queue.active = False
            if queue.jobs:
                queue.active = True
            else:
                self._active = tuple(other for other in self._active if other is not queue)

    def _sleep(self, bell: Doorbell, queues: tuple[JobQueue, ...], mine: list[JobQueue]) -> None:
        self._asleep_on = bell
        if queues is self._active and not self._stopping and not self._is_urgent:
            heads = [queue.jobs[0].job() for queue in mine]
            longest_s = min(
                (head.deadline.slice_s(LONGEST_POLL_INTERVAL_S) for head in heads if head.deadline is not None),
                default=LONGEST_POLL_INTERVAL_S,
            )
            if len(mine) < len(queues):
                longest_s = min(longest_s, NAP_S)
            wait_any([head.waiting_for for head in heads if head.waiting_for is not None], bell, longest_s)
        self._asleep_on = None
