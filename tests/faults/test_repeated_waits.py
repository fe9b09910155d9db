"""`wait` of an async call with a timeout names the missing ranks and can be repeated."""

from __future__ import annotations

import os
import re
import signal
import sys

import numpy as np
import pytest
from trying import attempt
from worlds import report

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
LIMIT_S = 5.0
LINE = r"at test_repeated_waits.py:\d+"


def wait_and_wait_again():
    group = dist.new_group(timeout=40, group_desc="patient")
    group.barrier()
    x, y = np.ones(4), np.ones(4)
    if dist.get_rank() == 1:
        report("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
        return [group.all_reduce(np.ones(4)).tolist() for _ in range(3)]
    first, second = group.all_reduce(x, async_op=True), group.all_reduce(y, async_op=True)
    failures = [attempt(lambda: first.wait(LIMIT_S)), attempt(lambda: second.wait(0.01))]
    report("gave up for now")
    assert first.wait(30)
    assert second.wait(30)
    return failures, [x.tolist(), y.tolist(), group.all_reduce(np.ones(4)).tolist()]


def test_who_waited_for_a_stopped_rank_waits_again_and_the_group_is_as_good_as_before(new_workers):
    workers = new_workers(2)
    workers.start(wait_and_wait_again)
    assert workers.reported(1) == "stopping"
    assert workers.reported(0) == "gave up for now"
    workers.signal(1, signal.SIGCONT)
    (first, second), summed = workers.outcome(0)
    absent = rf"rank 1 \(pid {workers.pids[1]} on [^)]*\)"
    assert {first.kind, second.kind} == {dist.DistTimeoutError}
    assert LIMIT_S <= first.took_s < LIMIT_S + 2
    begin = rf"all_reduce on group 'patient' \(rank 0 of 2\): not done after {LIMIT_S:g} s, waiting for {absent};"
    again = rf"{begin} the call continues; call wait\(\) again\n  who is waiting for whom:\n"
    assert re.match(again, first.message), first.message
    assert re.search(rf"rank 1 has not reached all_reduce\(float64\[4\], op=sum\), call 2 .* {LINE}", first.message)
    assert "rank 1 is stopped by a signal" in first.message
    behind = (
        rf"as it comes after all_reduce on group 'patient' \(rank 0 of 2\), waiting for {absent}; the call continues"
    )
    assert re.search(behind, second.message), second.message
    assert summed == workers.outcome(1) == [[2.0] * 4] * 3


def receive_and_wait_again():
    x = np.zeros(3)
    if dist.get_rank() > 0:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.send(np.arange(3.0), 0)
        return None
    work = dist.irecv(x, 1)
    failure = attempt(lambda: work.wait(0.05))
    dist.barrier()
    assert work.wait(30)
    return failure.message, x.tolist()


def test_who_waited_for_a_message_waits_again(world_of_3):
    message, received = world_of_3.run(receive_and_wait_again)[0]
    assert re.match(r"irecv on group 'world' .*: not done after 0.05 s, waiting for a message from rank 1", message)
    assert received == [0.0, 1.0, 2.0]
