"""A wait for an async call that is shorter than the call may take: it tells why the call is not done, and is no end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshdist.deadline import Deadline
from meshdist.debug.vigil import Watch, patience_s
from meshdist.errors import DistTimeoutError
from meshdist.outcome import not_yet

if TYPE_CHECKING:
    from meshdist.progress import Job, JobQueue
    from meshdist.work import Work

# Who waits for less looks whether it is done, and would not have others asked for the reason.
_CURIOUS_S = 1.0


def wait_for(work: Work, where: str, queue: JobQueue, limit_s: float) -> None:
    """Block until `work` is done, well or not.

    Args:
        work: The call's.
        where: How messages about it begin.
        queue: The calls that it is one of.
        limit_s: For how long.

    Raises:
        DistTimeoutError: Not done in time; says who is missing, and who waits for whom.
    """
    deadline = Deadline(limit_s)
    patience = patience_s(limit_s) if limit_s >= _CURIOUS_S else limit_s
    if work.done_within(patience, where):
        return
    with _watched(where, queue, deadline) as watch:
        if work.done_within(deadline.remaining_s(), where):
            return
        held_up = _held_up(work, queue)
        story = watch.story() if watch is not None else ""
        raise DistTimeoutError(f"{where}: {not_yet(limit_s, held_up)}{story}")


@contextmanager
def _watched(where: str, queue: JobQueue, deadline: Deadline) -> Iterator[Watch | None]:
    vigil, job = queue.progress.vigil, _first(queue)
    watch = None
    if vigil is not None and job is not None and job.waiting_for is not None and deadline.timeout_s >= _CURIOUS_S:
        watch = vigil.look(None, where, deadline, job.waiting_for)
    try:
        yield watch
    finally:
        if watch is not None:
            watch.end()


def _held_up(work: Work, queue: JobQueue) -> str:
    job = _first(queue)
    missing = "" if job is None or job.waiting_for is None else job.waiting_for.missing()
    if job is None or not missing:
        return ""
    return f", waiting for {missing}" if job.work is work else f", as it comes after {job.where}, waiting for {missing}"


def _first(queue: JobQueue) -> Job | None:
    try:
        return queue.jobs[0]
    except IndexError:  # it has just been done
        return None
