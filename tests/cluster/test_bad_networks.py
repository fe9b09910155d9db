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

CALLS = {"all_reduce": "dist.all_reduce(x)", "recv": "dist.recv(x, 1 - rank)"}


def start(hosts, script, folder):
    path = folder / "script.py"
    path.write_text(script)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": PORT, "MESHDIST_SECRET": "s"}
    return [hosts.start(rank, [sys.executable, str(path)], folder, RANK=str(rank), **variables) for rank in range(2)]


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
        assert re.match(rf"Dist(Backend|Network)Error {call} on group 'world' \(rank \d of 2\): ", line), line
        assert re.search(r"rank \d \(pid|is the network to its host cut", line.partition("): ")[2]), line
