"""Ctrl-C interrupts a wait and the peers learn of it; a timeout names the missing rank."""

import contextlib
import io
import re
import signal
import sys

import numpy as np
import pytest
from trying import attempt
from until import loaded

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
DETECTED_S = 1.0
BOTH_PATHS = pytest.mark.parametrize("backend", ["gloo", "gloo-slots", "gloo-tcp", "gloo-hosts"])
ABSENT = 1

CALLS = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "large all_reduce": lambda group: group.all_reduce(np.ones(1 << 20)),
    "barrier": lambda group: group.barrier(),
    "broadcast": lambda group: group.broadcast(np.ones(3), ABSENT),
    "recv": lambda group: group.recv(np.ones(3), ABSENT),
    "large send": lambda group: group.send(np.ones(1 << 20), ABSENT),
}
COLLECTIVES = ["all_reduce", "large all_reduce", "barrier", "broadcast"]


def connect():
    dist.barrier()


def call_announced(name):
    group = dist.group.WORLD
    return attempt(lambda: CALLS[name](group), announce=True), attempt(dist.barrier)


# ---- Ctrl-C


def interrupted():
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        attempt(lambda: dist.recv(np.ones(3), ABSENT), announce=True)
    return shown.getvalue()


def test_a_rank_that_ctrl_c_interrupts_says_what_it_was_waiting_for(new_workers):
    workers = new_workers(2)
    workers.start(interrupted, ranks=[0])
    workers.reported(0)
    workers.until_asleep(0)
    workers.signal(0, signal.SIGINT)
    words = r"interrupted; it has been in recv\(.*, at test_interrupts.*, for .* s, waiting for rank 1\n"
    assert re.fullmatch(f"meshdist rank 0: {words}", workers.outcome(0))


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "first call"])
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_in_a_wait(new_workers, name, connected):
    workers = new_workers(3)
    if connected:
        workers.start(connect)
        workers.gather()
    workers.start(call_announced, name, ranks=[0])
    workers.reported(0)
    workers.until_asleep(0)
    sent_s = workers.signal(0, signal.SIGINT)
    failure, after = workers.outcome(0)
    assert failure.kind is KeyboardInterrupt, failure
    assert failure.ended_s - sent_s < loaded(0.5), failure
    assert after.kind is dist.DistBackendError, after
    assert "barrier on group 'world'" in after.message
    assert re.search(r"KeyboardInterrupt; that was (call|message) \d+, at \S+\.py:\d+$", after.message), after.message
    assert "KeyboardInterrupt" in after.message


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "first call"])
@pytest.mark.parametrize("name", COLLECTIVES)
@BOTH_PATHS
def test_the_others_are_told_of_a_ctrl_c(new_workers, backend, name, connected):
    workers = new_workers(3, backend)
    if connected:
        workers.start(connect)
        workers.gather()
    workers.start(call_announced, name, ranks=[0, 2])
    for rank in (0, 2):
        workers.reported(rank)
        workers.until_asleep(rank)
    sent_s = workers.signal(2, signal.SIGINT)
    assert workers.outcome(2)[0].kind is KeyboardInterrupt
    failure, after = workers.outcome(0)
    assert failure.kind is dist.DistBackendError, failure
    assert failure.ended_s - sent_s < loaded(DETECTED_S), failure
    assert re.search(rf"rank 2 \(pid {workers.pids[2]} on .*KeyboardInterrupt", failure.message), failure
    assert "KeyboardInterrupt" in after.message
    # Who comes later is told as well.
    workers.start(call_announced, name, ranks=[ABSENT])
    workers.reported(ABSENT)
    late, next_call = workers.outcome(ABSENT)
    failed = late if late.kind else next_call  # a call that all have entered may still end well
    assert failed.kind is dist.DistBackendError, failed
    assert failed.ended_s - late.began_s < loaded(DETECTED_S), failed
    assert "KeyboardInterrupt" in failed.message, failed


def wait_for_work():
    dist.barrier()
    work = dist.all_reduce(np.ones(3), async_op=True)
    return attempt(work.wait, announce=True)


def test_ctrl_c_in_the_wait_for_a_work(new_workers):
    workers = new_workers(2)
    workers.start(connect, ranks=[1])
    workers.start(wait_for_work, ranks=[0])
    workers.outcome(1)
    workers.reported(0)
    workers.until_asleep(0)
    sent_s = workers.signal(0, signal.SIGINT)
    failure = workers.outcome(0)
    assert failure.kind is KeyboardInterrupt, failure
    assert failure.ended_s - sent_s < loaded(0.5)


# ---- Timeouts

TIMEOUT_S = 0.5


def call_with_timeout(name, connected):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    if connected:
        dist.barrier()  # from here on the ranks have as little time to connect as the group has
        group.barrier()
    if dist.get_rank() == ABSENT:
        dist.recv(np.ones(1), 0)  # the others have had enough
        return attempt(lambda: CALLS["barrier"](group))
    failure = attempt(lambda: CALLS[name](group))
    if dist.get_rank() == 0:
        dist.recv(np.ones(1), 2)
        dist.send(np.ones(1), ABSENT)
    else:
        dist.send(np.ones(1), 0)
    return failure


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "first call"])
@pytest.mark.parametrize("name", CALLS)
@BOTH_PATHS
def test_the_timeout_names_who_is_missing(worlds, backend, name, connected):
    outcomes = worlds.world(backend, 3).run(call_with_timeout, name, connected)
    waited = [outcomes[0], outcomes[2]]
    for failure in waited:
        assert failure.kind in (dist.DistTimeoutError, dist.DistBackendError), failure
        assert failure.took_s < TIMEOUT_S + loaded(DETECTED_S), failure
        assert re.search(r"on group 'short of time' \(rank [02] of 3\): ", failure.message), failure
        assert re.search(r"rank 1 \(pid \d+ on ", failure.message), failure
    # The first to give up says so; another one may be told by it before its own time is over.
    first = next(failure for failure in waited if failure.kind is dist.DistTimeoutError)
    assert first.took_s >= TIMEOUT_S - 0.01, first
    assert f"timed out after {TIMEOUT_S:g} s waiting for" in first.message, first
    # Who comes too late does not wait for those who have given up.
    assert outcomes[ABSENT].took_s < loaded(DETECTED_S), outcomes[ABSENT]


def work_with_timeout():
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    if dist.get_rank() == ABSENT:
        return None
    work = group.all_reduce(np.ones(3), async_op=True)
    return attempt(work.wait)


@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-slots"])
def test_the_timeout_of_an_async_call(worlds, backend):
    failure, _ = worlds.world(backend, 2).run(work_with_timeout)
    assert failure.kind is dist.DistTimeoutError, failure
    assert TIMEOUT_S - 0.01 <= failure.took_s < TIMEOUT_S + loaded(DETECTED_S), failure
    assert re.search(r"all_reduce on group 'short of time' \(rank 0 of 2\): .*ranks? \[?1", failure.message), failure


def call_short(name):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    return attempt(lambda: CALLS[name](group), announce=True)


@pytest.mark.parametrize("name", ["all_reduce", "recv"])
def test_a_stopped_rank_is_named_at_the_timeout(new_workers, name):
    workers = new_workers(2)
    workers.start(connect)
    workers.gather()
    workers.signal(1, signal.SIGSTOP)
    workers.start(call_short, name, ranks=[0])
    workers.reported(0)
    failure = workers.outcome(0)
    workers.signal(1, signal.SIGCONT)
    assert failure.kind is dist.DistTimeoutError, failure
    assert f"rank 1 (pid {workers.pids[1]} on " in failure.message, failure
    assert failure.took_s < TIMEOUT_S + loaded(DETECTED_S), failure


def short_of_time_on_threads():
    if dist.get_rank() == ABSENT:
        return None
    return attempt(lambda: dist.barrier(dist.new_group(timeout=0.2)))


def test_the_timeout_on_threads():
    failure, *_ = dist.run(short_of_time_on_threads, 3, timeout=20)
    # A rank that has finished is no reason to wait any longer.
    assert failure.kind in (dist.DistTimeoutError, dist.DistBackendError), failure
    assert "barrier on group" in failure.message
    assert "1" in failure.message
