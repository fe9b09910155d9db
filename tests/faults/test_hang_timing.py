"""Hang reports on slow machines and with a slow store: their content, and how many ranks find them."""

from __future__ import annotations

import logging
import re
import threading
import time

import numpy as np
import pytest
from trying import attempt

import meshdist as dist
from meshdist.debug.dump import TIMED_OUT
from meshdist.debug.hang_watchdog import Finding, StateExchange
from meshdist.runtime.context import current_slot

pytestmark = pytest.mark.timeout(60)


class SlowStateExchange(StateExchange):
    """An exchange of states that is slower for some ranks.

    Args:
        exchange: The exchange that it slows down.
        rank: Whose it is.
        board: What the ranks have told: for all of them one.
        publish_s: How long it takes until a rank's state is there.
        gather: Called before the states of the others are asked for.
        told: What the leader has found.
        last: Gets the states of ranks that give up: for all of them one.
    """

    def __init__(self, exchange, rank, board, publish_s=0.0, gather=lambda: None, told=None, last=None):
        self.exchange, self.rank, self.board, self.publish_s, self.before = exchange, rank, board, publish_s, gather
        self.told = told or Finding()
        self.last = {} if last is None else last

    def publish(self, state, *, waits):
        if self.rank not in self.board:
            time.sleep(self.publish_s)
        if waits:
            self.board[self.rank] = state
        else:
            self.last[self.rank] = state

    def retract(self, *, keeps_state=False):
        self.board.pop(self.rank, None)

    def gather(self, budget_s):
        self.before()
        return self.exchange.gather(budget_s)

    def leader(self):
        return min(self.board, default=None)

    def report(self, hang_report):
        """Nobody is told: it would come too late for those that begin at once."""

    def reported(self):
        return self.told


def go_slowly(**slow):
    world = current_slot().world
    make = world.observer.make_exchange
    world.observer.make_exchange = lambda: SlowStateExchange(make(), world.rank, **slow)


def test_of_those_that_begin_to_wait_at_once_one_warns(caplog):
    board, free = {}, threading.Event()

    def main():
        go_slowly(board=board, publish_s=0.12 if dist.get_rank() == 0 else 0.0)
        group = dist.new_group(timeout=6.0)
        group.barrier()
        if dist.get_rank() == 1:
            free.wait(4.5)
        group.barrier()

    with caplog.at_level(logging.WARNING, "meshdist"):
        dist.run(main, 3)
    warnings = [record.rank for record in caplog.records if "has been waiting for" in record.getMessage()]
    assert warnings == [0]


def time_out(board, enough, **slow):
    """Have rank 0 time out, as rank 1 does not come until `enough` is set; return how."""
    go_slowly(board=board, **slow)
    group = dist.new_group(timeout=1.0)
    group.barrier()
    if dist.get_rank() == 1:
        enough.wait(30)
        return None
    failure = attempt(lambda: group.all_reduce(np.ones(4)))
    enough.set()
    return failure


def test_a_story_that_is_long_in_coming_is_waited_for():
    board, enough = {}, threading.Event()
    failure = dist.run(lambda: time_out(board, enough, gather=lambda: time.sleep(0.8)), 2)[0]
    assert failure.kind is dist.DistTimeoutError
    assert "rank 1 has not reached all_reduce(float64[4], op=sum), call 2" in failure.message
    assert failure.took_s < 3.0


def test_a_rank_that_was_told_nothing_finds_it_out_by_itself():
    board, enough = {}, threading.Event()

    def main():
        rank = dist.get_rank()
        go_slowly(board=board, gather=(lambda: enough.wait(30)) if rank == 0 else lambda: None)
        first = dist.new_group([0, 1], timeout=8.0)
        second = dist.new_group([1, 2], timeout=3.0)
        if rank == 1:
            enough.wait(30)
            first.barrier()
            return None
        if rank == 0:
            return attempt(first.barrier)
        failure = attempt(second.barrier)
        enough.set()
        return failure

    failure = dist.run(main, 3)[2]
    assert failure.kind is dist.DistTimeoutError
    assert "rank 1 has not reached barrier(), call 1" in failure.message


def test_a_finding_of_before_says_how_old_it_is():
    board, enough = {0: {}}, threading.Event()  # rank 0 leads
    told = Finding("  rank 1 is in load_data", time_s=time.time() - 5.0)

    def main():
        rank = dist.get_rank()
        go_slowly(board=board, told=told)
        group = dist.new_group(timeout=30.0 if rank == 0 else 1.0)
        group.barrier()
        if rank == 1:
            enough.wait(30)
        failure = attempt(group.barrier)
        enough.set()
        return failure

    failure = dist.run(main, 3)[2]
    assert failure.kind is dist.DistTimeoutError
    said = re.search(r"who is waiting for whom, as of (.*) s ago:\n  rank 1 is in load_data", failure.message)
    assert 5.0 <= float(said[1]) <= 10.0


def test_the_last_state_of_a_rank_is_kept_though_it_does_not_wait_for_the_answer():
    board, last, enough = {}, {}, threading.Event()
    failure = dist.run(lambda: time_out(board, enough, gather=lambda: enough.wait(30), last=last), 2)[0]
    assert failure.kind is dist.DistTimeoutError
    assert last[0]["reason"] == TIMED_OUT


@pytest.mark.slow
def test_a_warning_is_repeated_in_a_line_while_the_hang_is_the_same():
    warnings, free = [], threading.Event()

    class Warnings(logging.Handler):
        """Lets the absent rank go on once the first warning has been repeated."""

        def emit(self, record):
            if "has been waiting for" in record.getMessage():
                warnings.append(record.getMessage())
                if len(warnings) > 1:
                    free.set()

    def main():
        group = dist.new_group(timeout=20.0)
        group.barrier()
        if dist.get_rank() == 1:
            free.wait(15)
        group.barrier()

    logger, handler = logging.getLogger("meshdist"), Warnings()
    logger.addHandler(handler)
    try:
        dist.run(main, 3)
    finally:
        logger.removeHandler(handler)
    first, second = warnings
    assert len(first.splitlines()) > 2
    again = re.search(r"has been waiting for (\S+) s \(timeout: 20 s\): (rank 1 has not reached .*)", second)
    assert again, second
    assert again[2] in first
    assert "\n" not in second
    assert float(again[1]) >= 2 * float(re.search(r"has been waiting for (\S+) s", first)[1]) - 0.2
