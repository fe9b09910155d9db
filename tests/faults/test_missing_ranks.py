"""init_process_group waits for missing ranks until its timeout, within a tenth, and names them."""

from __future__ import annotations

import re
import sys

import pytest
from trying import attempt
from until import loaded
from worlds import worker_rank

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
TIMEOUT_S = 4.0


def join(url):
    return attempt(
        lambda: dist.init_process_group("gloo", init_method=url, rank=worker_rank(), world_size=4, timeout=TIMEOUT_S)
    )


def check(failure, words):
    assert issubclass(failure.kind, dist.DistError), failure
    assert 0.9 * TIMEOUT_S <= failure.took_s <= TIMEOUT_S + loaded(0.1 * TIMEOUT_S), failure
    assert re.search(words, failure.message), failure


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_two_of_four_do_not_come(new_workers, port, tmp_path, kind):
    workers = new_workers(3, join=False)
    workers.start(join, f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/meet", ranks=[0, 2])
    for rank in (0, 2):
        check(workers.outcome(rank), "ranks 1 and 3 are missing|ranks 1, 3 are missing")


def test_nobody_is_there(new_workers, port):
    workers = new_workers(2, join=False)
    workers.start(join, f"tcp://127.0.0.1:{port}", ranks=[1])
    check(workers.outcome(1), f"127.0.0.1:{port} within {TIMEOUT_S:g} s")


def test_an_address_that_leads_nowhere(new_workers):
    workers = new_workers(2, join=False, MESHDIST_SECRET="secret")
    workers.start(join, "tcp://192.0.2.1:29500", ranks=[1])  # of documentation: nobody has it
    check(workers.outcome(1), f"192.0.2.1:29500 within {TIMEOUT_S:g} s")
