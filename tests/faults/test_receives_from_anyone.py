"""Ranks that wait for each other where one waits for a message from any of several: all raise, unless one may send."""

from __future__ import annotations

import re
import sys
import threading

import numpy as np
import pytest
from cycles import LATE_S, later
from trying import attempt, outcomes_of, start

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
TIMEOUT_S = 300.0
ADVICE = "let one of them send before it receives, or call sendrecv, which does both at once"
over_tcp = [pytest.param(name, marks=pytest.mark.slow) for name in ("gloo-tcp", "gloo-hosts")]


def master_and_workers():
    return attempt(lambda: dist.recv(np.ones(4), src=0 if dist.get_rank() else None))


def all_from_anyone():
    return attempt(lambda: dist.recv(np.ones(4)))


def after_other_messages():
    """As master and workers, after each has sent the others messages of both lengths, some of which are left over."""
    rank, short, long = dist.get_rank(), np.ones(4), np.ones(100_000)
    others = [other for other in range(3) if other != rank]
    works = [dist.irecv(np.empty_like(long), src=other) for other in others]
    for other in others:
        dist.isend(short, dst=other, tag=7).wait()
    for work in [*works, *[dist.isend(long, dst=other) for other in others]]:
        work.wait()
    return master_and_workers()


WAITS = {
    master_and_workers: ("any rank", "rank 0", "rank 0"),
    all_from_anyone: ("any rank",) * 3,
    after_other_messages: ("any rank", "rank 0", "rank 0"),
}


@pytest.mark.parametrize("backend", ["threads", "gloo", *over_tcp])
@pytest.mark.parametrize("program", WAITS)
def test_every_rank_raises_if_none_is_left_that_may_send(new_workers, backend, program):
    there = r" \(a message with tag 7 is waiting to be received\)" if program is after_other_messages else ""
    steps = [
        f"rank {rank} waits for {'a message from ' if source == 'any rank' else ''}{source}"
        rf" in recv\(float64\[4\] from {source}, tag=0\), message \d+ on 'world', at test_receives\w+\.py:\d+{there}"
        for rank, source in enumerate(WAITS[program])
    ]
    received = (
        "let ranks 0, 1, 2 receive the messages that are waiting, with their tags and sources; or " if there else ""
    )
    lines = [*steps, f"{received}{ADVICE}"]
    text = "\n  ".join(["deadlock: the ranks wait for each other, and none can proceed", *lines])
    for rank, failure in enumerate(outcomes_of(new_workers, program, 3, backend)):
        assert failure.kind is dist.DistBackendError, failure
        assert re.fullmatch(rf"recv on group 'world' \(rank {rank} of 3\): {text}", failure.message), failure.message
        assert failure.took_s < 30.0


def beside_a_circle():
    """Ranks 2 and 3 wait for each other, and ranks 0 and 1 for any of them, or for each other."""
    rank = dist.get_rank()
    pair = dist.new_group([2, 3], group_desc="pair")
    if rank > 1:
        return attempt(pair.barrier if rank == 2 else lambda: dist.recv(np.ones(4), src=2))
    return attempt(lambda: dist.recv(np.ones(4), src=0 if rank else None))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_ranks_that_wait_for_others_in_a_circle_fail_with_them(new_workers, backend):
    failures = outcomes_of(new_workers, beside_a_circle, 4, backend)
    assert all(failure.kind is dist.DistBackendError for failure in failures), failures
    for failure in failures[2:]:
        assert re.findall(r"rank (\d) waits for rank (\d) in (\w+)", failure.message)[-2:] == [
            ("2", "3", "barrier"),
            ("3", "2", "recv"),
        ]


def answer(group, others):
    """Receive a message from any rank, and answer the others; return the sender."""
    x = np.ones(1)
    source = group.recv(x)
    for other in others:
        group.send(x, other)
    return source


def one_computes(group, rank):
    if rank == 0:
        return answer(group, [1])
    if rank == 2:
        later()
        group.send(np.ones(1), 0)
        return 0
    return group.recv(np.ones(1), 0)


def one_has_a_callback(group, rank):
    """Rank 1 receives from rank 0, and has posted a receive from rank 2, whose callback sends."""
    x = np.ones(1)
    group.barrier()
    if rank == 0:
        group.recv(x, 1)
        return answer(group, [1, 2])
    if rank == 1:
        group.send(x, 0)  # which connects them: the send of the callback must end at once
        work = group.irecv(np.ones(1), 2)
        sent = threading.Event()
        work.get_future().add_done_callback(lambda future: (group.isend(x, 0).wait(), sent.set()))
        group.recv(np.ones(1), 0)
        work.wait()
        return int(not sent.wait(LATE_S))
    later()
    group.send(x, 1)
    return group.recv(x, 0)


def one_has_another_thread(group, rank):
    x = np.ones(1)
    if rank == 0:
        return answer(group, [1, 2])
    if rank == 1:
        return group.recv(x, 0)
    thread = threading.Timer(LATE_S, lambda: group.send(np.ones(1), 0))
    thread.start()
    source = group.recv(x, 0)
    thread.join()
    return source


def one_waits_for_a_fourth(group, rank):
    """Rank 2 waits for rank 3, which is not of the group and computes, and sends then."""
    if rank == 2:
        dist.recv(np.ones(1), src=3)
        group.send(np.ones(1), 0)
        return group.recv(np.ones(1), 0)
    return answer(group, [1, 2]) if rank == 0 else group.recv(np.ones(1), 0)


def others_have_sent(group, rank):
    """The messages are there, or under way, before the receive from any rank begins."""
    x = np.ones(1)
    if rank == 0:
        later()
        sources = [group.recv(x), answer(group, [1, 2])]
        return abs(sum(sources) - 3)
    group.send(x, 0)
    return group.recv(x, 0)


SOURCES = {
    one_computes: 2,
    one_has_a_callback: 1,
    one_has_another_thread: 2,
    one_waits_for_a_fourth: 2,
    others_have_sent: 0,
}


def goes_on(program):
    """Run one of the programs on the first three of four ranks."""
    rank, group = dist.get_rank(), dist.new_group([0, 1, 2])
    fourth = dist.new_group([0, 1, 2, 3])
    result = None
    if rank < 3:
        result = program(group, rank)
    elif program is one_waits_for_a_fourth:
        later()
        dist.send(np.ones(1), dst=2)
    fourth.barrier()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_as_long_as_one_may_send_no_rank_raises(new_workers, backend):
    # Each program has a world of its own, so that all are late at the same time.
    worlds = [start(new_workers, goes_on, 4, backend, program) for program in SOURCES]
    results = {program: outcomes() for program, outcomes in zip(SOURCES, worlds, strict=True)}
    assert results == {program: [source, 0, 0, None] for program, source in SOURCES.items()}
