"""Two hosts with two networks between them, of which one fails: the ranks go on over the other."""

import re
import sys
import time

import pytest
from two_hosts import TwoHosts, ip, make_two_hosts

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

# A little more than the silence after which another network is tried.
SILENT_S = 4.0

# The store is not on the network, so that nothing but the links tells how it is.
RANK = """
import os, sys
import numpy as np
import meshdist as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{os.getcwd()}/store", rank=rank, world_size=2, timeout=60)
number = 0
try:
    enough = np.zeros(1)
    while not enough[0]:
        for count in (1, 1000, 300_000):
            x = np.arange(count) % 11 + rank + number
            assert (dist.all_reduce(x.copy()) == 2 * (np.arange(count) % 11 + number) + 1).all()
            work = dist.isend(x, 1 - rank)
            got = np.empty_like(x)
            dist.recv(got, 1 - rank)
            assert (got == x - rank + 1 - rank).all()
            work.wait()
        number += 1
        print("round", number, flush=True)
        enough[0] = os.path.exists("enough")
        dist.broadcast(enough, 0)
    dist.destroy_process_group()
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
else:
    print("over", flush=True)
"""


class TwoNetworks(TwoHosts):
    """Hosts with the networks 0 and 1 between them."""

    def build(self):
        super().build()
        first, second = (f"{link}x" for link in self.links)
        ip("link", "add", first, "netns", self.names[0], "type", "veth", "peer", second, "netns", self.names[1])
        for host, (name, link) in enumerate(zip(self.names, (first, second), strict=True)):
            ip("-n", name, "addr", "add", f"10.213.78.{host + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")

    def networks(self, host):
        return f"{self.links[host]},{self.links[host]}x"

    def fail(self, network):
        """Cut one network, without a word of the kernel that it finds no neighbour."""
        for host, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            other, device = f"10.213.{77 + network}.{2 - host}", link + ["", "x"][network]
            ip("-n", name, "neigh", "replace", other, "dev", device, "lladdr", "02:00:00:00:00:99", "nud", "permanent")


@pytest.fixture
def hosts():
    made = make_two_hosts(TwoNetworks)
    yield made
    made.remove()


def start(hosts, folder):
    (folder / "rank.py").write_text(RANK)
    processes = [
        hosts.start(
            host,
            [sys.executable, "rank.py"],
            folder,
            RANK=str(host),
            MESHDIST_SECRET="s",
            GLOO_SOCKET_IFNAME=hosts.networks(host),
        )
        for host in range(2)
    ]
    wait_for_rounds(processes, 2)
    return processes


def wait_for_rounds(processes, number):
    for process in processes:
        for _ in range(number):
            line = process.stdout.readline()
            assert line.startswith("round"), (line, process.stderr.read())


def drain(process):
    """Return the first line that is not of a round."""
    return next(line for line in process.stdout if not line.startswith("round"))


def test_ranks_go_on_over_the_other_network(hosts, tmp_path):
    processes = start(hosts, tmp_path)
    hosts.fail(0)
    failed_s = time.monotonic()
    while time.monotonic() - failed_s < SILENT_S:  # until then, lines from before may be in the pipes
        wait_for_rounds(processes, 1)
    wait_for_rounds(processes, 1)
    (tmp_path / "enough").touch()
    assert [drain(process) for process in processes] == ["over\n"] * 2


@pytest.mark.exhaustive
def test_an_error_on_both_sides_names_the_link_when_both_networks_have_failed(hosts, tmp_path):
    processes = start(hosts, tmp_path)
    for network in range(2):
        hosts.fail(network)
    failed_s = time.monotonic()
    lines = [drain(process) for process in processes]
    assert time.monotonic() - failed_s < 11.0
    for rank, line in enumerate(lines):
        words = rf"(DistBackend|PeerConnection)Error \w+ on group 'world' \(rank {rank} of 2\): rank {1 - rank} "
        assert re.match(words, line), line
        assert re.search(r"does not answer: nothing has come from its host|its connection with \S+ was reset", line), (
            line
        )
