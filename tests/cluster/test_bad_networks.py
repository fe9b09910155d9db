"""The network between two hosts, which are network namespaces, is slow, loses packets, or is cut."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(120)
PORT = "29513"
CUT_S = 10.0

WORK = """
import numpy as np
import meshdist as dist
dist.init_process_group("gloo", timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(5):
    for count in (1, 1000, 100_000):
        assert set(dist.all_reduce(np.full(count, rank + step)).tolist()) == {2 * step + 1}
    x = np.full(20_000, step)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    assert set(x.tolist()) == {step}
dist.barrier()
dist.destroy_process_group()
print("all is right")
"""

WAIT = """
import numpy as np
import meshdist as dist
dist.init_process_group("gloo", timeout=60)
rank, x = dist.get_rank(), np.zeros(1000)
dist.all_reduce(x)
print("there", flush=True)
try:
    while True:
        CALL
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
"""

# Without a store on the network, only the connection between the ranks tells that the other host has vanished.
VANISH = """
import os, sys, time
import numpy as np
import meshdist as dist
rank = int(os.environ["RANK"])
os.environ["MESHDIST_SOCKET_IFNAME"] = sys.argv[1]
dist.init_process_group("gloo", f"file://{os.getcwd()}/store", rank=rank, world_size=2, timeout=60)
x = np.zeros(1000)
dist.send(x, 0) if rank == 1 else dist.recv(x, 1)  # over one connection
if rank == 1:
    NUM_SENT and [dist.isend(np.zeros(60_000, np.uint8), 0) for _ in range(NUM_SENT)]
print("there", flush=True)
sys.stdin.readline()
try:
    if rank == 1:
        dist.send(x, 0)
    dist.recv(x, 1 - rank, tag=1)
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
"""

CALLS = {"all_reduce": "dist.all_reduce(x)", "recv": "dist.recv(x, 1 - rank)"}


def start(hosts, script, folder):
    path = folder / "script.py"
    path.write_text(script)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": PORT, "MESHDIST_SECRET": "s"}
    python = [sys.executable, str(path)]
    return [
        hosts.start(rank, [*python, link], folder, RANK=str(rank), **variables) for rank, link in enumerate(hosts.links)
    ]


def spoil(hosts, *how):
    """Have the cable treat packets so, in both directions."""
    if shutil.which("tc") is None:
        pytest.skip("needs the program tc (iproute2)")
    for name, link in zip(hosts.names, hosts.links, strict=True):
        command = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "netem", *how]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"the kernel does not spoil networks here: {done.stderr.strip()}")


@pytest.mark.parametrize(
    "how", [("delay", "30ms", "10ms"), ("loss", "3%"), ("delay", "5ms", "loss", "3%")], ids=" ".join
)
def test_delay_and_loss_cost_time_alone(two_hosts, tmp_path, how):
    spoil(two_hosts, *how)
    for process in start(two_hosts, WORK, tmp_path):
        out, err = process.communicate(timeout=90)
        assert (process.returncode, out, err) == (0, "all is right\n", "")


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_a_cut_is_an_error_on_both_sides_in_ten_seconds(two_hosts, tmp_path, call):
    """Also where a rank says nothing, and waits for a message alone."""
    processes = start(two_hosts, WAIT.replace("CALL", CALLS[call]), tmp_path)
    for process in processes:
        assert process.stdout.readline() == "there\n"
    cut_s = time.monotonic()
    two_hosts.cut()
    for process in processes:
        line = process.stdout.readline()
        assert time.monotonic() - cut_s < CUT_S, line
        assert re.match(
            rf"(Dist(Backend|Network)|PeerConnection)Error {call} on group 'world' \(rank \d of 2\): ", line
        ), line
        assert re.search(r"rank \d \(pid|is the network to its host cut", line.partition("): ")[2]), line


@pytest.mark.parametrize("num_sent", [0, 500], ids=["a message", "more than the other rank has room for"])
def test_a_host_that_vanishes_with_unacknowledged_bytes_is_noticed_in_ten_seconds(two_hosts, tmp_path, num_sent):
    """And neither side is told that the other's process has ended, since nothing says so."""
    script = VANISH.replace("NUM_SENT", str(num_sent))
    processes = start(two_hosts, script, tmp_path)
    for process in processes:
        assert process.stdout.readline() == "there\n"
    two_hosts.vanish()
    lines = []
    for process in reversed(processes):  # rank 1 alone at first, which rank 0 cannot tell anything
        began_s = time.monotonic()
        process.stdin.write("\n")
        process.stdin.flush()
        lines.append(process.stdout.readline())
        assert time.monotonic() - began_s < CUT_S, lines
    silent = "does not answer: nothing has come from its host for 8 s"
    assert re.match(rf"PeerConnectionError \w+ on group 'world' \(rank 1 of 2\): rank 0 \([^)]*\) {silent}", lines[0])
    assert re.match(r"\w+Error recv on group 'world' \(rank 0 of 2\): rank 1 ", lines[1])
    assert "has died" not in lines[1]
