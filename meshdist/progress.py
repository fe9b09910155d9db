"""The progress thread: carries out async calls, per group in the order they were made.

One thread per rank, started by the first async call. It holds the head of every group's queue and moves on those
that are ready, so groups do not wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from meshdist.deadline import Deadline
from meshdist.errors import DistTimeoutError
from meshdist.waiting import Doorbell, Doorbells, Waitable, is_ready, wait_any
from meshdist.work import Work

# How often the thread looks for what is ready before it sleeps: some tens of microseconds. It must not keep the
# interpreter from the caller, who computes meanwhile.
LOOKS = 50


class Job:
    """A call that the progress thread carries out.

    Args:
        steps: Makes the iterator that carries out the call; called when the call is its group's next.
        work: What the user holds.
        timeout_s: From when it is next.
        where: How messages about it begin.
        failed: Told what the call fails with; returns what the user gets.
    """

    def __init__(
        self,
        steps: Callable[[], Iterator[Waitable]],
        work: Work,
        timeout_s: float,
        where: str,
        failed: Callable[[BaseException], BaseException],
    ) -> None:
        self.work = work
        self.waiting_for: Waitable | None = None
        self._make_steps = steps
        self._steps: Iterator[Waitable] | None = None
        self._timeout_s = timeout_s
        self._where = where
        self._failed = failed

    def advance(self) -> bool:
        """Go as far as possible without waiting; return True when the call is done, well or not."""
        try:
            if self._steps is None:
                self._steps, self._deadline = self._make_steps(), Deadline(self._timeout_s)
            while self.waiting_for is None or is_ready(self.waiting_for):
                self.waiting_for = next(self._steps, None)
                if self.waiting_for is None:
                    self.work.finish(None)
                    return True
            if self._deadline.expired():
                missing = self.waiting_for.missing()
                raise DistTimeoutError(f"{self._where}: timed out after {self._timeout_s:g} s waiting for {missing}")
        except BaseException as error:  # whatever it is, it belongs to whoever waits for this work
            self.work.finish(self._failed(error))
            return True
        return False


class JobQueue:
    """The async calls of one group, in order."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()


class Progress:
    """The progress thread of one rank."""

    def __init__(self, bells: Doorbells, name: str) -> None:
        self._bells = bells
        self._name = name
        self._lock = threading.Lock()
        self._active: list[JobQueue] = []
        self._asleep_on: Doorbell | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, queue: JobQueue, job: Job) -> None:
        """Append `job` to its group's queue."""
        with self._lock:
            queue.jobs.append(job)
            if queue not in self._active:
                self._active.append(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            bell = self._asleep_on
        if bell is not None:
            bell.ring()

    def drain(self, queue: JobQueue) -> None:
        """Wait until the calls of a group are done, well or not; each has its deadline."""
        for job in list(queue.jobs):
            job.work.settle()

    def close(self) -> None:
        """Stop the thread. The queues are empty."""
        self._stopping = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with self._lock:
                bell = self._asleep_on
            if bell is not None:
                bell.ring()
            thread.join()

    def _run(self) -> None:
        bell = self._bells.mine()
        looks = 0
        while not self._stopping:
            with self._lock:
                queues = list(self._active)
            moved = [self._advance(queue) for queue in queues]
            looks = 0 if any(moved) else looks + 1
            if looks > LOOKS:
                self._sleep(bell, queues)

    def _advance(self, queue: JobQueue) -> bool:
        moved = False
        while queue.jobs and queue.jobs[0].advance():
            moved = True
            with self._lock:
                queue.jobs.popleft()
                if not queue.jobs:
                    self._active.remove(queue)
        return moved

    def _sleep(self, bell: Doorbell, queues: list[JobQueue]) -> None:
        with self._lock:
            if queues != self._active:
                return
            self._asleep_on = bell
        heads = [queue.jobs[0].waiting_for for queue in queues]
        wait_any([head for head in heads if head is not None], bell)
        self._asleep_on = None
