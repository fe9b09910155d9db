"""Backend gloo between hosts, which are network namespaces."""

import re
import sys
import time
from pathlib import Path

import pytest
from until import until

pytestmark = pytest.mark.timeout(120)
PROGRAM = Path(__file__).with_name("collectives_between_hosts.py")
PORT = "29511"

FOR_EVER = """
import time
import numpy as np
import meshdist as dist
dist.init_process_group("gloo", timeout=30)
x = np.zeros(1000)
dist.all_reduce(x)
open(f"there{dist.get_rank()}", "w").close()
try:
    while True:
        dist.all_reduce(x)
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
"""

STRANGERS = """
import numpy as np
import meshdist as dist
dist.init_process_group("gloo", timeout=20)
try:
    dist.all_reduce(np.zeros(1))
except dist.DistNetworkError as error:
    print(error, flush=True)
"""


def start_ranks(hosts, per_host, script, cwd, arguments=(), **variables):
    """Start ranks on the two hosts, so many on each."""
    places = [host for host, count in enumerate(per_host) for _ in range(count)]
    return [
        hosts.start(
            host,
            [sys.executable, str(script), *arguments],
            cwd,
            **{
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": hosts.addresses[0],
                "MASTER_PORT": PORT,
                "MESHDIST_SECRET": "s",
                **variables,
            },
        )
        for rank, host in enumerate(places)
    ]


def finish(process, timeout_s=90):
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


@pytest.mark.parametrize("per_host", [(1, 1), (1, 2), (2, 2)], ids=str)
def test_everything_between_two_hosts(two_hosts, tmp_path, per_host):
    ended = [finish(process) for process in start_ranks(two_hosts, per_host, PROGRAM, tmp_path)]
    size = sum(per_host)
    assert ended == [(0, f"rank {rank} of {size} is through\n", "") for rank in range(size)]


def test_named_interfaces_one_of_which_leads_nowhere(two_hosts, tmp_path):
    processes = []
    for rank, link in enumerate(two_hosts.links):
        started = start_ranks(
            two_hosts,
            [1 - rank, rank],
            PROGRAM,
            tmp_path,
            RANK=str(rank),
            WORLD_SIZE="2",
            MESHDIST_SOCKET_IFNAME=f"{link},lo",
        )
        processes += started
    assert [finish(process)[0] for process in processes] == [0, 0]


def test_cut_cable_ends_all_ranks_in_seconds(two_hosts, tmp_path):
    per_host = (2, 1)
    script = tmp_path / "script.py"
    script.write_text(FOR_EVER)
    processes = start_ranks(two_hosts, per_host, script, tmp_path)
    until(lambda: all((tmp_path / f"there{rank}").exists() for rank in range(sum(per_host))), "all are there", 60)
    began_s = time.monotonic()
    two_hosts.cut()
    ended = [finish(process) for process in processes]
    # As long as TCP takes to give up, some 10 s, and then as long as ranks take that cannot reach their store to leave.
    assert time.monotonic() - began_s < 30
    for status, out, err in ended:
        assert status == 0, err
        assert re.match(r"(Dist(Backend|Network)|PeerConnection)Error all_reduce on group 'world' \(rank", out), out


def test_killed_rank_of_the_other_host_is_named_within_a_second(two_hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FOR_EVER)
    processes = start_ranks(two_hosts, (1, 1), script, tmp_path)
    until(lambda: all((tmp_path / f"there{rank}").exists() for rank in range(2)), "both are there", 60)
    processes[1].kill()
    killed_s = time.monotonic()
    line = processes[0].stdout.readline()
    assert time.monotonic() - killed_s < 2.0
    assert re.match(
        r"(DistBackendError|PeerConnectionError) all_reduce on group 'world' \(rank 0 of 2\): .*"
        r"rank 1 \(pid \d+ on .*has died",
        line,
    )
    assert finish(processes[0])[0] == 0


def test_network_is_refused_without_a_secret(two_hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STRANGERS)
    # The store comes in a file, so that the wire alone is to be refused.
    script.write_text(STRANGERS.replace('"gloo"', f'"gloo", "file://{tmp_path}/store", rank=RANK, world_size=2'))
    script.write_text(script.read_text().replace("RANK,", "int(__import__('os').environ['RANK']),"))
    ended = [finish(process) for process in start_ranks(two_hosts, (1, 1), script, tmp_path, MESHDIST_SECRET="")]
    for status, out, err in ended:
        assert status == 0, err
        assert "this job has no secret" in out, (out, err)
