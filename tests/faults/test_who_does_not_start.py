"""Ranks that do not start are waited for as long as was said, give or take a tenth, and named."""

from __future__ import annotations

import re
import sys

import pytest
from trying import attempt
from worlds import crew_rank

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
TIMEOUT_S = 4.0


def join(url):
    return attempt(
        lambda: dist.init_process_group("gloo", init_method=url, rank=crew_rank(), world_size=4, timeout=TIMEOUT_S)
    )


def check(failure, words):
    assert issubclass(failure.kind, dist.DistError), failure
    assert 0.9 * TIMEOUT_S <= failure.took_s <= 1.1 * TIMEOUT_S, failure
    assert re.search(words, failure.message), failure


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_two_of_four_do_not_come(new_crew, port, tmp_path, kind):
    crew = new_crew(3, join=False)
    crew.start(join, f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/meet", ranks=[0, 2])
    for rank in (0, 2):
        check(crew.outcome(rank), "ranks 1 and 3 are missing|ranks 1, 3 are missing")


def test_nobody_is_there(new_crew, port):
    crew = new_crew(2, join=False)
    crew.start(join, f"tcp://127.0.0.1:{port}", ranks=[1])
    check(crew.outcome(1), f"127.0.0.1:{port} within {TIMEOUT_S:g} s")


def test_an_address_that_leads_nowhere(new_crew):
    crew = new_crew(2, join=False, MESHDIST_SECRET="secret")
    crew.start(join, "tcp://192.0.2.1:29500", ranks=[1])  # of documentation: nobody has it
    check(crew.outcome(1), f"192.0.2.1:29500 within {TIMEOUT_S:g} s")
