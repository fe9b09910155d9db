"""Every wait reports in the same words how a peer ended, whenever the rank notices."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from by_hand import KILLED, run_ranks

import meshdist as dist

VICTIM = 4
SCRIPT = """
import os, signal, sys, time
import numpy as np
import meshdist as dist

url, rank, end, met = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "met"
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=5, timeout=10)
pairs = [dist.new_group([other, 4], group_desc=f"pair {other}") for other in range(4)]
x = np.zeros(100_000)
WAITS = [
    lambda: dist.all_reduce(x, group=pairs[0]),
    lambda: dist.send(x, 4, group=pairs[1]),
    lambda: dist.recv(x, 4, group=pairs[2]),
    lambda: dist.recv(x, group=pairs[3]),
]
if met:
    for other in range(4):
        if rank in (other, 4):
            pairs[other].barrier()
if rank == 4:
    if end == "raise":
        raise ValueError("boom")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "leave":
        dist.destroy_process_group()
        os._exit(0)
    if end == "destroy":
        for pair in pairs:
            dist.destroy_process_group(pair)
        dist.barrier()
        dist.destroy_process_group()
else:
    began_s = time.monotonic()
    try:
        WAITS[rank]()
    except dist.DistBackendError as error:
        print(f"{time.monotonic() - began_s:.1f} {error.peer_failed} {error}")
    if end == "destroy":
        dist.barrier()
    dist.destroy_process_group()
"""
# Which call of the group, and where: the script comes from the command line.
NUMBER = r"(; (its last was call 1, )?this is (call|message) [12], at <string>:\d+)?"
LEFT_OUT = ("making this call", "receiving the message", "sending the awaited message", None)
ENDS = {
    "destroy": ("has destroyed the group", " without "),
    "leave": (r"called destroy_process_group\(\)", " without "),
    "return": (r"has ended without destroy_process_group\(\)", " and without "),
    "raise": ("failed: it raised ValueError: boom", None),
    "kill": (KILLED, None),
}


@pytest.mark.parametrize("met", ["met", "unmet"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.slow
def test_every_wait_says_what_the_peer_did(tmp_path, end, met):
    outcomes = run_ranks(SCRIPT, lambda rank: [f"file://{tmp_path}/meet", str(rank), end, met], 5)
    what, link = ENDS[end]
    for rank, left_out in enumerate(LEFT_OUT):
        status, out, err = outcomes[rank]
        assert (status, err) == (0, ""), outcomes[rank]
        took_s, peer_failed, message = out.strip().split(maxsplit=2)
        assert float(took_s) < 3, out
        assert peer_failed == "True"
        assert re.match(rf"\w+ on group 'pair {rank}' \(rank 0 of 2, global rank {rank}\): ", message), message
        described = r"rank 1 \(global rank 4, pid \d+ on [^)]*\) "
        words = what + (link + left_out if link and left_out else "")
        before = "all others are gone: " if link and not left_out else ": "
        assert re.search(f"{before}{described}{words}{NUMBER}$", message), message
    if end == "raise":
        # One fault is told once.
        assert "destroy_process_group" not in outcomes[VICTIM][2]


def take_of_any():
    if dist.get_rank() == 2:
        with pytest.raises(dist.DistBackendError, match="all others are gone: rank 0 .*; rank 1 .*") as raised:
            dist.recv(np.zeros(1))
        return str(raised.value)
    return None


def test_who_takes_of_any_rank_is_told_of_all_that_are_gone_on_threads():
    reports = dist.run(take_of_any, 3, timeout=20)[2]
    assert re.search(
        r"rank 0 has finished; rank 1 has finished; this is message 1, at test_exit_reports.py:\d+$", reports
    )


ANY = """
import sys, time
import numpy as np
import meshdist as dist

url, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=3, timeout=20)
dist.barrier()
if rank == 2:
    began_s = time.monotonic()
    try:
        dist.recv(np.zeros(1))
    except dist.DistBackendError as error:
        print(f"{time.monotonic() - began_s:.1f} {error}")
dist.destroy_process_group()
"""


def test_who_takes_of_any_rank_is_told_before_the_store_goes(port):
    """Rank 0 holds the store, and waits for rank 2 before it gives it up."""
    outcomes = run_ranks(ANY, lambda rank: [f"tcp://127.0.0.1:{port}", str(rank)], 3)
    took_s, message = outcomes[2][1].strip().split(maxsplit=1)
    assert float(took_s) < 10.0  # of a timeout of 20 s
    gone = [rf"rank {rank} \(pid \d+ on [^)]*\) called destroy_process_group\(\)" for rank in (0, 1)]
    assert re.search(f"recv on group 'world' .*all others are gone: {gone[0]}; {gone[1]}{NUMBER}$", message), message


ONE_OF_MANY = """
import os, signal, sys, time
import numpy as np
import meshdist as dist

url, rank, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ["MESHDIST_HOST_ID"] = sys.argv[4 + rank]
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=3, timeout=20)
dist.barrier()
if rank == 0:
    for other in (1, 2):  # which have left the barrier
        dist.recv(np.zeros(1), other)
    if end == "raise":
        raise ValueError("boom")
    os.kill(os.getpid(), signal.SIGKILL)
dist.send(np.zeros(1), 0)
began_s = time.monotonic()
try:
    dist.recv(np.zeros(1), None if rank == 2 else 2)  # who takes of rank 2 hears nothing of rank 0
except dist.DistBackendError as error:
    print(f"{time.monotonic() - began_s:.1f} {error}")
"""


@pytest.mark.parametrize("hosts", ["aaa", "abc"], ids=["one host", "three hosts"])
@pytest.mark.parametrize("end", ["raise", "kill"])
def test_who_takes_of_any_rank_is_told_of_the_first_that_gives_up_or_dies_as_it_may_have_been_the_one(
    tmp_path, end, hosts
):
    outcomes = run_ranks(ONE_OF_MANY, lambda rank: [f"file://{tmp_path}/meet", str(rank), end, *hosts], 3)
    took_s, message = outcomes[2][1].strip().split(maxsplit=1)
    assert float(took_s) < 3, message
    what = {"raise": "failed: it raised ValueError: boom", "kill": KILLED}[end]
    assert re.search(rf"recv on group 'world' .*: rank 0 \(pid \d+ on [^)]*\) {what}{NUMBER}$", message), message
    assert "rank 2" in outcomes[1][1]


CHILD = """
import multiprocessing as mp, sys
import numpy as np
import meshdist as dist

def main(rank, url, method):
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=20)
    if rank == 0:
        raise ValueError("boom")
    try:
        dist.barrier()
    except dist.DistBackendError as error:
        print(error)
    dist.destroy_process_group()

if __name__ == "__main__":
    context = mp.get_context(sys.argv[2])
    ranks = [context.Process(target=main, args=(rank, *sys.argv[1:])) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_says_what_it_raised(tmp_path, method):
    script = tmp_path / "children.py"
    script.write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), f"file://{tmp_path}/meet", method]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=40)
    assert re.search(r"barrier on group 'world' .*rank 0 .* failed: it raised ValueError: boom", done.stdout.strip())
    assert done.stderr.count("ValueError: boom") == 1
    assert "destroy_process_group" not in done.stderr


def wait_for_a_tag(src):
    group = dist.new_group(timeout=0.3)
    if dist.get_rank() == 0:
        for tag in (4, 1, 4):
            group.send(np.zeros(1), 1, tag=tag)
    else:
        group.recv(np.zeros(1), 0, tag=4)
        with pytest.raises(dist.DistTimeoutError, match="timed out after 0.3 s waiting for a message from") as raised:
            group.recv(np.zeros(1), src, tag=2)
    dist.barrier()
    return None if dist.get_rank() == 0 else str(raised.value)


@pytest.mark.parametrize("src", [0, None], ids=["rank 0", "any"])
def test_a_timeout_says_which_tags_are_there(worlds, src):
    for backend in ("threads", "gloo"):
        reports = worlds.world(backend, 2).run(wait_for_a_tag, src)[1]
        source = r"rank 0( \(pid \d+ on [^)]*\))?" + (", the only other rank," if src is None else "")
        assert re.search(
            f"from {source} with tag 2; messages with tags 1, 4 are waiting to be received$", reports, re.MULTILINE
        ), reports


# The progress thread finds the message of a rank that has ended since, just as it goes to sleep.
GONE = """
import os, sys
import numpy as np
import meshdist as dist
from meshdist.backends.gloo.match import GlooRecvRequest

url, rank, sleeps = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=20)
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if rank == 1:
    while not os.path.exists(sleeps):
        pass
    dist.isend(np.ones(8), dst=0)
    os._exit(0)

arm = GlooRecvRequest.arm


def arm_late(self, bell):
    open(sleeps, "w").close()
    while os.path.exists(f"/proc/{pids[1]}/exe"):
        pass
    arm(self, bell)


GlooRecvRequest.arm = arm_late
work = dist.irecv(np.empty(8), src=1)
while os.path.exists(f"/proc/{pids[1]}/exe"):
    pass
try:
    work.wait()
    print("received", flush=True)
except dist.DistBackendError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_rank_that_ends_before_its_first_message_is_found_is_told(port, tmp_path):
    outcomes = run_ranks(GONE, lambda rank: [f"tcp://127.0.0.1:{port}", str(rank), str(tmp_path / "sleeps")], 2)
    assert re.match(r"received|irecv on group 'world' \(rank 0 of 2\): rank 1 ", outcomes[0][1]), outcomes
