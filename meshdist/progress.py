"""The progress thread: carries out async calls, per group in the order they were made.

One thread per rank, started by the first async call. It holds the head of every queue and moves on those that are
ready, so queues do not wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from types import CodeType
from typing import TYPE_CHECKING

from meshdist.deadline import Deadline
from meshdist.debug.flight_recorder import CODE, COMPLETED, INSTRUCTION, STARTED, Record, clock
from meshdist.errors import DistError
from meshdist.limits import start_thread
from meshdist.outcome import CarrierThread
from meshdist.systems import let_others_run
from meshdist.waiting import LONGEST_NAP_S, Doorbell, Doorbells, Waitable, is_ready, timed_out, wait_any
from meshdist.work import Work

if TYPE_CHECKING:
    from meshdist.debug.vigil import Vigil, Watch

# How often the thread looks for what is ready before it sleeps, some tens of microseconds. In between it lets others
# run: a peer that shares its processor, and the caller, who computes meanwhile.
LOOKS = 50


class Job:
    """A call that the progress thread carries out.

    Args:
        steps: Makes the iterator that carries out the call; called when the call is its queue's next.
        work: What the user holds.
        timeout_s: From when it is next.
        where: How messages about it begin.
        failed: Told what the call fails with, and its record; returns what the user gets.
        record: The flight recorder's, which knows where the user made the call.
    """

    __slots__ = (
        "_failed",
        "_make_steps",
        "_steps",
        "_timeout_s",
        "deadline",
        "error",
        "record",
        "waiting_for",
        "watch",
        "where",
        "work",
    )

    def __init__(
        self,
        steps: Callable[[], Iterator[Waitable]],
        work: Work,
        timeout_s: float,
        where: str,
        failed: Callable[[BaseException, str, Record], BaseException],
        record: Record,
    ) -> None:
        self.record = record
        self.watch: Watch | None = None
        self.work = work
        self.waiting_for: Waitable | None = None
        self.deadline: Deadline | None = None
        self.error: BaseException | None = None
        self._make_steps = steps
        self._steps: Iterator[Waitable] | None = None
        self._timeout_s = timeout_s
        self.where = where
        self._failed = failed

    def advance(self, check: bool, vigil: Vigil | None = None) -> bool:
        """Go as far as possible without waiting; return True when the call is done, well or not.

        Args:
            check: Look as well whether what is waited for can still come, and the deadline; which takes longer.
            vigil: Looks after a call that waits for long.
        """
        try:
            steps = self._steps
            if steps is None:
                self.record[STARTED] = clock()
                steps = self._steps = self._make_steps()
            waitable = self.waiting_for
            while waitable is None or waitable.ready() or (check and is_ready(waitable)):
                waitable = self.waiting_for = next(steps, None)
                if waitable is None:
                    self.record[COMPLETED] = clock()
                    return True
            if self.deadline is None:
                self.deadline = Deadline(self._timeout_s)
            elif check and self.deadline.expired():
                raise timed_out(self.where, self._timeout_s, waitable, self.watch)
            elif check and vigil is not None:
                self.watch = vigil.look(self.watch, self.where, self.deadline, waitable)
        except BaseException as error:  # whatever it is, it belongs to whoever waits for this work
            if self.watch is not None and isinstance(error, DistError):
                self.watch.give_up(error)
            self.error = self._failed(error, self.where, self.record)
            return True
        return False


class JobQueue:
    """Calls that are carried out one after the other.

    Attributes:
        jobs: Those that are not done.
        active: The progress thread looks after it.
        progress: The thread.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.jobs: deque[Job] = deque()
        self.active = False


class Progress:
    """The progress thread of one rank.

    Attributes:
        vigil: Looks after calls that wait for long.
    """

    def __init__(self, bells: Doorbells, name: str) -> None:
        self.vigil: Vigil | None = None
        self._bells = bells
        self._name = name
        self._lock = threading.Lock()
        # Replaced, never changed: the thread goes over it without the lock.
        self._active: tuple[JobQueue, ...] = ()
        self._asleep_on: Doorbell | None = None
        self._thread: CarrierThread | None = None
        self._stopping = False
        self._settling: Work | None = None
        self._carried: Job | None = None

    def submit(self, queue: JobQueue, job: Job) -> None:
        """Append `job` to its queue."""
        job.work.queue = queue
        queue.jobs.append(job)
        # The thread takes a queue out of its list first and then looks once more for jobs, so either it sees this
        # one, or this sees that the queue is out of the list.
        if not queue.active:
            self._activate(queue)

    def drain(self, queue: JobQueue) -> None:
        """Wait until the calls of a queue are done, well or not; each has its deadline."""
        for work in self.works([queue]):
            work.await_done(None, "draining a group")

    def works(self, queues: list[JobQueue]) -> list[Work]:
        """Return the works of the calls that are in queues, and of the one that has just left its queue."""
        works = [job.work for queue in queues for job in list(queue.jobs)]
        if self._settling is not None:
            works.append(self._settling)
        return works

    def close(self) -> None:
        """Stop the thread. The queues are empty."""
        self._stopping = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake()
            while thread.is_alive():
                thread.join(LONGEST_NAP_S)

    def disown(self, what: str) -> None:
        """In a process that was forked of the rank, without its threads: have the calls under way fail with `what`."""
        for work in self.works([*self._active]):
            work.settle(DistError(what))

    def _activate(self, queue: JobQueue) -> None:
        with self._lock:
            if not queue.active:
                queue.active = True
                self._active = (*self._active, queue)
            if self._thread is None:
                # Callbacks run on it: they must find the world that they belong to.
                self._thread = CarrierThread(target=copy_context().run, args=(self._run,), name=self._name, daemon=True)
                self._thread.site = self._site
                try:
                    start_thread(self._thread)
                except DistError:
                    self._thread, self._active, queue.active = None, (), False
                    queue.jobs.clear()
                    raise
        self._wake()

    def _site(self) -> tuple[CodeType | None, int]:
        job = self._carried
        return (None, 0) if job is None else (job.record[CODE], job.record[INSTRUCTION])

    def _wake(self) -> None:
        bell = self._asleep_on
        if bell is not None:
            bell.ring()

    def _run(self) -> None:
        bell = self._bells.mine()
        looks = 0
        while not self._stopping:
            queues = self._active
            last_look = looks >= LOOKS
            moved = [self._advance(queue, last_look) for queue in queues]
            if any(moved):
                looks = 0
            elif last_look:
                self._sleep(bell, queues)
            else:
                looks += 1 + len(queues)
                let_others_run()

    def _advance(self, queue: JobQueue, check: bool) -> bool:
        jobs = queue.jobs
        moved = False
        while jobs:
            job = jobs[0]
            self._carried = job
            if not job.advance(check, self.vigil):
                return moved
            if job.watch is not None:
                job.watch.end()
            moved = True
            # Whoever waits may make the next call at once: it must find the queue without this one.
            self._settling = job.work
            jobs.popleft()
            if not jobs:
                self._deactivate(queue)
            job.work.settle(job.error)
            self._settling = self._carried = None  # nothing keeps the arrays of what is done
        return moved

    def _deactivate(self, queue: JobQueue) -> None:
        with self._lock:
            queue.active = False
            if queue.jobs:
                queue.active = True
            else:
                self._active = tuple(other for other in self._active if other is not queue)

    def _sleep(self, bell: Doorbell, queues: tuple[JobQueue, ...]) -> None:
        self._asleep_on = bell
        if queues is self._active and not self._stopping:
            heads = [queue.jobs[0] for queue in queues]
            longest_s = min(
                (head.deadline.slice_s(LONGEST_NAP_S) for head in heads if head.deadline is not None),
                default=LONGEST_NAP_S,
            )
            wait_any([head.waiting_for for head in heads if head.waiting_for is not None], bell, longest_s)
        self._asleep_on = None
