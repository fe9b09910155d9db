"""When a wait for async calls goes on, and when it is another one."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from meshdist.core import Record
from meshdist.debug import deadlock
from meshdist.debug.deadlock import DeadlockDetector
from meshdist.runtime.flight_recorder import CallFacts
from meshdist.runtime.job import Job
from meshdist.runtime.progress import Awaited, JobQueue, Progress
from meshdist.runtime.waiting import WithoutBell
from meshdist.runtime.work import Work
from meshdist.store import HashStore


class Step(WithoutBell):
    """A wait for rank 1."""

    is_ready = False

    def ready(self):
        return self.is_ready

    def check(self):
        return

    def missing(self):
        return "rank 1"

    def awaits(self):
        return [1]


class Rank:
    """Rank 0 of two, one of whose threads waits for any of some async collectives, each of a group of its own."""

    def __init__(self, num_calls):
        self.progress = Progress(None, "progress")
        self.jobs = [self.begin(f"group {number}") for number in range(num_calls)]
        works = tuple(job.work for job in self.jobs)
        self.progress.awaited = Awaited(works, threading.get_ident(), 0)
        groups = [
            SimpleNamespace(
                name=f"group {number}",
                ranks=(0, 1),
                outstanding=1,
                has_left=lambda rank: False,
                messages=SimpleNamespace(post_deferred=lambda: None),
            )
            for number in range(num_calls)
        ]
        world = SimpleNamespace(
            rank=0,
            size=2,
            store=HashStore(),
            log=logging.getLogger(__name__),
            groups=groups,
            progress=self.progress,
            recorder=SimpleNamespace(records=lambda: self.progress.records),
            peers=SimpleNamespace(traffic=dict),
        )
        self.detector = DeadlockDetector(world, list_threads())

    def begin(self, group):
        queue, work = JobQueue(self.progress), Work("all_reduce", None)
        work.queue = queue
        facts = CallFacts("all_reduce", group, group, "all_reduce()", [], [], None, 300.0)
        job = Job(
            list, work, 300.0, "all_reduce", lambda error, *_: error, Record(facts, 1, 0, 0, list_threads.__code__, 0)
        )
        job.waiting_for = Step()
        queue.jobs.append(job)
        self.progress._active = (*self.progress._active, queue)
        return job

    def look(self, wait, job):
        self.detector._next_s = 0.0
        return self.detector.look(wait, job.waiting_for)


def list_threads():
    return {thread.ident for thread in threading.enumerate()}


@pytest.fixture
def make_rank(monkeypatch):
    monkeypatch.setattr(deadlock, "in_progress_thread", lambda: True)
    ranks = []

    def make(num_calls):
        ranks.append(Rank(num_calls))
        return ranks[-1]

    yield make
    for rank in ranks:
        if rank.detector._wait is not None:
            rank.detector._wait.end()
        rank.detector.close(10.0)


def number_of(wait):
    return wait._blocked.number


def test_each_step_of_a_collective_is_a_wait_of_its_own(make_rank):
    rank = make_rank(1)
    (job,) = rank.jobs
    wait = rank.look(None, job)
    assert rank.look(wait, job) is wait
    job.waiting_for = Step()
    assert rank.look(wait, job) is None
    assert wait.has_ended
    wait.join(10.0)
    assert number_of(rank.look(None, job)) > number_of(wait)


def test_all_calls_of_a_wait_any_have_one_wait(make_rank):
    rank = make_rank(2)
    first, second = rank.jobs
    wait = rank.look(None, first)
    assert rank.look(None, second) is wait
    wait.end()  # as the second call ends
    assert rank.look(wait, first) is None


def test_a_wait_any_confirms_nothing_if_another_of_its_calls_is_ready(make_rank):
    rank = make_rank(2)
    first, second = rank.jobs
    wait, seen = rank.look(None, first), {1: SimpleNamespace(number=7, traffic={})}
    second.waiting_for.is_ready = True
    wait._confirm(seen)
    assert wait._confirmed == {}
    second.waiting_for.is_ready = False
    wait._confirm(seen)
    assert wait._confirmed == {1: 7}
