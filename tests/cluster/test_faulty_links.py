"""Every call while the link between two hosts delays, reorders and loses packets, or carries none for a while."""

import re
import time

import pytest
from test_gloo_between_hosts import finish, start_ranks
from until import loaded

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
exhaustive = pytest.mark.exhaustive

# Calls without end, each checked, until the file "enough" is there; a line for each round.
CALLS = """
import os
import numpy as np
import meshdist as dist
dist.init_process_group("gloo", timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
others = [each for each in range(size) if each != rank]

def rounds(number):
    for count in (1, 1000, 100_000):
        x = np.arange(count) % 13 + rank + number
        total = sum(np.arange(count) % 13 + each + number for each in range(size))
        yield dist.all_reduce(x.copy()), total
        y = x.copy()
        dist.broadcast(y, 1)
        yield y, x - rank + 1
        everything = np.empty((size, count), x.dtype)
        dist.all_gather_into_tensor(everything, x)
        yield everything, np.stack([x - rank + each for each in range(size)])
        dist.all_to_all_single(everything, np.stack([x + 100 * each for each in range(size)]))
        yield everything, np.stack([x - rank + each + 100 * rank for each in range(size)])
        part = np.empty(count, x.dtype)
        dist.reduce_scatter_tensor(part, np.concatenate([x + 7 * each for each in range(size)]))
        yield part, total + 7 * rank * size
        sent = [dist.isend(x, other, tag=3) for other in others]
        for other in others:
            dist.recv(part, other, tag=3)
            yield part, x - rank + other
        for work in sent:
            work.wait()
    dist.barrier()

number = 0
enough = np.zeros(1)
while not enough[0]:
    for got, expected in rounds(number):
        np.testing.assert_array_equal(got, expected)
    number += 1
    print("round", number, flush=True)
    enough[0] = os.path.exists("enough")
    dist.broadcast(enough, 0)
dist.destroy_process_group()
print("all is right", flush=True)
"""

WAIT = """
import numpy as np
import meshdist as dist
dist.init_process_group("gloo", timeout=60)
x = np.zeros(1000)
dist.all_reduce(x)
print("there", flush=True)
try:
    while True:
        dist.all_reduce(x)
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
"""

REST = """
import sys
import numpy as np
import meshdist as dist
dist.init_process_group("gloo", timeout=60)
x = np.ones(1000)
dist.all_reduce(x)
print("rests", flush=True)
sys.stdin.readline()
dist.all_reduce(x)
dist.destroy_process_group()
print("all is right", flush=True)
"""

# Which hosts' packets are lost.
WAYS = {"both ways": (), "from the first": (0,), "from the second": (1,)}
NOTICED_S = 10.0


class Rounds:
    """Reads how far the ranks are."""

    def __init__(self, processes):
        self._processes = processes

    def wait_for_more(self, number=2):
        """Wait until each rank has ended so many more rounds."""
        for process in self._processes:
            for _ in range(number):
                line = process.stdout.readline()
                assert line.startswith("round"), (line, process.stderr.read())


@pytest.fixture
def calls(faulty_hosts, tmp_path):
    """Ranks that call without end, two on the first host and one on the other; at the end, all was right."""
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    processes = start_ranks(faulty_hosts, (2, 1), script, tmp_path)
    rounds = Rounds(processes)
    rounds.wait_for_more()
    yield rounds
    (tmp_path / "enough").touch()
    faulty_hosts.link.mend()
    for status, out, err in map(finish, processes):
        assert status == 0, err
        assert out.endswith("all is right\n")


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"delay_s": 0.01, "jitter_s": 0.01}, id="reordered"),
        pytest.param({"loss": 0.05}, id="lost", marks=exhaustive),
        pytest.param({"delay_s": 0.002, "jitter_s": 0.03, "loss": 0.02}, id="both", marks=exhaustive),
    ],
)
def test_calls_on_a_link_that_reorders_and_loses_packets(calls, faulty_hosts, faults):
    for name, value in faults.items():
        setattr(faulty_hosts.link, name, value)
    calls.wait_for_more()


@pytest.mark.parametrize(
    ("cut_s", "from_hosts"),
    [
        pytest.param(1.0, (), id="1 s"),
        *(pytest.param(5.0, from_hosts, id=f"5 s {name}", marks=exhaustive) for name, from_hosts in WAYS.items()),
    ],
)
def test_calls_go_on_after_a_short_cut(calls, faulty_hosts, cut_s, from_hosts):
    faulty_hosts.link.cut(*from_hosts)
    time.sleep(cut_s)  # the fault itself
    faulty_hosts.link.mend()
    calls.wait_for_more()


@exhaustive
def test_connections_at_rest_survive_a_short_cut(faulty_hosts, tmp_path):
    """Also that to the store, where nothing is sent but the kernel's probes."""
    script = tmp_path / "rest.py"
    script.write_text(REST)
    processes = start_ranks(faulty_hosts, (1, 1), script, tmp_path)
    for process in processes:
        assert process.stdout.readline() == "rests\n"
    for cut, lasts_s in ((False, 3.5), (True, 4.0), (False, 2.0)):  # the fault itself
        faulty_hosts.link.cut_from = {0, 1} if cut else set()
        time.sleep(lasts_s)
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for status, out, err in map(finish, processes):
        assert (status, out) == (0, "all is right\n"), err


@exhaustive
@pytest.mark.parametrize("from_hosts", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("call", ["all_reduce(x)", "recv(x, 1 - dist.get_rank())"])
def test_a_cut_that_lasts_is_an_error_on_both_sides(faulty_hosts, tmp_path, from_hosts, call):
    script = tmp_path / "wait.py"
    script.write_text(WAIT.replace("        dist.all_reduce(x)", f"        dist.{call}"))
    processes = start_ranks(faulty_hosts, (1, 1), script, tmp_path)
    for process in processes:
        assert process.stdout.readline() == "there\n"
    began_s = time.monotonic()
    faulty_hosts.link.cut(*from_hosts)
    lines = [process.stdout.readline() for process in processes]
    assert time.monotonic() - began_s < loaded(NOTICED_S)
    for line in lines:
        assert re.match(r"(Dist(Backend|Network)|PeerConnection)Error \w+ on group 'world' \(rank \d of 2\)", line)
    words = "does not answer|cut off|reset|nothing has come|lost the store"
    assert all(re.search(words, line) for line in lines), lines
    faulty_hosts.link.mend()
    assert [finish(process)[0] for process in processes] == [0, 0]
