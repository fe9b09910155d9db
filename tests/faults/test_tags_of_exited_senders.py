"""A receive from a rank that has exited names the tags of the messages that it sent."""

from __future__ import annotations

import re

import pytest
from by_hand import run_ranks
from worlds import needs_linux

pytestmark = [pytest.mark.timeout(60), needs_linux]
SCRIPT = """
import sys
import numpy as np
import meshdist as dist

url, rank, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=int(sys.argv[4]), timeout=20)
x = np.zeros(10)
if rank == 0:
    dist.send(x, 1, tag=1)
    dist.send(x, 1, tag=7)
    if end.endswith("destroy"):
        dist.destroy_process_group()
else:
    try:
        dist.recv(x, *([] if end.startswith("any") else [0]), tag=2)
    except dist.DistBackendError as error:
        print(error)
"""
ENDS = {
    "destroy": "called destroy_process_group() without",
    "end": "has ended without destroy_process_group() and without",
}


@pytest.mark.parametrize("variables", [{}, {"MESHDIST_DISABLE_SHM": "1"}], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("end", ENDS)
def test_the_tags_of_the_messages_that_came_are_named(tmp_path, end, variables):
    outcomes = run_ranks(SCRIPT, lambda rank: [f"file://{tmp_path}/meet", str(rank), end, "3"], 3, **variables)
    words = f"{ENDS[end]} sending the awaited message"
    assert (
        f"{words} with tag 2; messages with tags 1, 7 are waiting to be received; this is message 1" in outcomes[1][1]
    ), outcomes
    assert f"{words}; this is message 1" in outcomes[2][1], outcomes  # to which it has sent none


def test_the_tags_are_named_if_any_rank_might_have_sent(tmp_path):
    outcomes = run_ranks(SCRIPT, lambda rank: [f"file://{tmp_path}/meet", str(rank), "any destroy", "2"], 2)
    # The only other rank has left before the receive, or while it waited for a message of that rank.
    words = r"called destroy_process_group\(\)(?: without sending the awaited message with tag 2)?"
    words += "; messages with tags 1, 7 are waiting to be received; this is"
    assert re.search(words, outcomes[1][1]), outcomes
