"""The error about a rank that ended says how and at which call of the group, for each transport."""

from __future__ import annotations

import re
import sys

import pytest
from by_hand import KILLED, run_ranks
from until import loaded

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
SCRIPT = """
import os, signal, sys, time
import numpy as np
import meshdist as dist

url, rank, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if os.environ.get("HOSTS"):
    os.environ["MESHDIST_HOST_ID"] = f"host {rank % 2}"
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=3, timeout=30)
tp = dist.new_group(group_desc="tp")
for step in range(17):
    tp.all_reduce(np.ones(4))
if rank == 2:
    print(time.monotonic(), flush=True)
    if end == "raise":
        raise ValueError("boom" + chr(10) + "and more")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
else:
    try:
        tp.all_reduce(np.ones(4))
    except dist.DistBackendError as error:
        print(time.monotonic(), error)
"""
LINE = SCRIPT.splitlines().index("        tp.all_reduce(np.ones(4))") + 1
WAYS = {"shared memory": {}, "tcp": {"MESHDIST_DISABLE_SHM": "1"}, "hosts": {"HOSTS": "2"}}
SAID = {
    "return": (0, r"has ended without destroy_process_group\(\) and without making this call; its last was call 17, "),
    "raise": (1, r"failed: it raised ValueError: boom; "),
    "kill": (-9, f"{KILLED}; "),
}
DETECTED_S = 1.5  # with the end of an interpreter


@pytest.mark.parametrize("end", SAID)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_the_others_are_told_at_which_call_a_rank_went(tmp_path, way, end):
    url = f"file://{tmp_path}/meet"
    outcomes = run_ranks(SCRIPT, lambda rank: [url, str(rank), end], 3, **WAYS[way])
    status, words = SAID[end]
    assert [outcome[0] for outcome in outcomes] == [0, 0, status], outcomes
    gone_s = float(outcomes[2][1])
    for rank in range(2):
        noticed_s, message = outcomes[rank][1].strip().split(maxsplit=1)
        assert float(noticed_s) - gone_s < loaded(DETECTED_S), outcomes
        # The one that has noticed it first may have told the other.
        where = r"all_reduce on group 'tp' \(rank [01] of 3\): (rank [01] \(pid [^)]*\) failed(: | because ))?rank 2 "
        where += r"\(pid \d+ on [^)]*\) "
        assert re.search(where + words + rf"this is call 18, at <string>:{LINE}$", message), message
