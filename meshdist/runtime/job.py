"""Job: an async call as the progress of its group carries it out, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshdist.core import Record
from meshdist.errors import DistError
from meshdist.runtime.flight_recorder import clock
from meshdist.runtime.waiting import EXPLAINED_FROM_S, Waitable, WaitObserver, Watch, is_ready, timed_out
from meshdist.runtime.work import Work, carried
from meshdist.system.deadline import Deadline


class Job:
    """A call that the progress thread carries out."""

    __slots__ = (
        "_is_over", "_steps", "deadline", "error", "error_prefix", "failed", "make_steps", "record", "timeout_s",
        "waiting_for", "watch", "work",
    )  # fmt: skip

    def __init__(
        self,
        # Makes the iterator that carries out the call; called when the call becomes the head of its queue.
        make_steps: Callable[[], Iterator[Waitable]],
        work: Work,  # the user's handle
        timeout_s: float,  # counted from the first wait of the call
        error_prefix: str,  # name, group and rank of the call
        # Called with the error, the prefix and the record of a failed call; returns the error for the user.
        failed: Callable[[BaseException, str, Record], BaseException],
        record: Record,  # the call's record in the flight recorder
        error: BaseException | None = None,
    ) -> None:
        self.make_steps, self.work = make_steps, work
        self.timeout_s, self.error_prefix = timeout_s, error_prefix
        self.failed, self.record, self.error = failed, record, error
        self.watch: Watch | None = None
        self.waiting_for: Waitable | None = None
        self.deadline: Deadline | None = None
        self._steps: Iterator[Waitable] | None = None
        self._is_over = False  # done, or failed

    def advance(self, check: bool, observer: WaitObserver | None = None) -> bool:
        """Advance as far as possible without waiting; return True when the call is done or has failed.

        With `check`, it also checks the peers and the deadline, which takes longer; `observer` reports long waits.
        """
        if self._is_over:
            return True
        carried.place = self.record.code, self.record.instruction
        try:
            steps = self._steps
            if self.error is not None:  # the core could not begin the call, or this was interrupted below
                raise self.error
            if steps is None:
                self.record.started = self.record.started or clock()
                steps = self._steps = self.make_steps()
            waitable = self.waiting_for
            while waitable is None or waitable.ready() or (check and is_ready(waitable)):
                waitable = self.waiting_for = next(steps, None)
                if waitable is None:
                    self.record.completed = clock()
                    self._is_over = True
                    return True
            if self.deadline is None:
                self.deadline = Deadline(self.timeout_s)
            elif check:
                missing = waitable.missing() if self.deadline.expired() else None
                if observer is not None and (missing is None or self.timeout_s >= EXPLAINED_FROM_S):
                    self.watch = observer.look(self.watch, self.error_prefix, self.deadline, waitable)
                if missing is not None and not waitable.ready():
                    raise timed_out(self.error_prefix, self.timeout_s, missing, self.watch)
        except BaseException as error:  # raised again where the user waits for this work
            self.error = error
            if self.watch is not None and isinstance(error, DistError):
                error = self.watch.give_up(error) or error
            self.error = self.failed(error, self.error_prefix, self.record)
            self._is_over = True
            return True
        finally:
            carried.place = None
        return False

    def settle(self) -> None:
        """Settle the work of a call that is done or has failed."""
        if self.watch is not None:
            self.watch.end()
        self.work.settle(self.error)

    def job(self) -> Job:
        """Return this job: an entry of a queue has one."""
        return self
