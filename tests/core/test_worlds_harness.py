"""The harness itself: it returns results and exceptions, and a failure stays in its test."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds import RankFailedError, WorkerSet, report

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


def rank_and_sum():
    return dist.get_rank(), int(dist.all_reduce(np.array(1)))


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ZeroDivisionError("as asked")
    dist.barrier()


def end_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def tell_and_return():
    report(("about to", dist.get_rank()))
    return "done"


def test_results_come_in_rank_order(world_of_3):
    assert world_of_3.run(rank_and_sum) == [(0, 3), (1, 3), (2, 3)]


def test_the_exception_of_the_rank_that_failed_by_itself_is_raised(world_of_3):
    with pytest.raises(ZeroDivisionError, match="as asked"):
        world_of_3.run(fail_on, 1)
    assert world_of_3.run(rank_and_sum) == [(0, 3), (1, 3), (2, 3)]


def test_a_rank_that_ends_is_replaced(worlds):
    world = worlds.world("gloo", 2)
    with pytest.raises(RankFailedError, match="rank 1 of 2 ended"):
        world.run(end_on, 1)
    assert world.run(rank_and_sum) == [(0, 2), (1, 2)]


def test_a_workers_tells_while_it_runs(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(tell_and_return)
        assert [workers.reported(1), workers.reported(0)] == [("about to", 1), ("about to", 0)]
        assert workers.gather() == ["done", "done"]
        workers.signal(0, signal.SIGKILL)
        assert workers.ended(0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_any_directories_of_tests_can_be_run_together():
    folders = sorted({str(path.parent) for path in Path(__file__).parents[1].glob("*/*.py")}, reverse=True)
    assert len(folders) > 5
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout
