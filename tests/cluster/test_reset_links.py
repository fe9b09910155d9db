"""Connections between two hosts that are reset at any moment: they are made again, and every byte comes once."""

import random
import re
import signal
import subprocess
import threading
import time

import pytest
from test_faulty_links import CALLS, WAIT, Rounds
from test_gloo_between_hosts import PORT, finish, start_ranks
from until import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
exhaustive = pytest.mark.exhaustive
ENCRYPTION = {"encrypted": {}, "in the clear": {"MESHDIST_ENCRYPTION": "off"}}
# Between two resets.
PAUSE_S = 0.05
NUM_RESETS = 20


def reset(hosts, host):
    """Have the kernel of one host reset its connections with ranks and the store; return how many these were."""
    words = ["-K", "-tnH", "state", "established"]
    done = subprocess.run(
        ["ip", "netns", "exec", hosts.names[host], "ss", *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"the kernel resets no connections here: {done.stderr.strip()}")
    return len(done.stdout.splitlines())


@pytest.fixture(params=ENCRYPTION.values(), ids=ENCRYPTION.keys())
def calls(request, tmp_path):
    """Start ranks that call without end, two on the first host and one on the other; at the end, all was right."""
    started = []

    def make(hosts):
        script = tmp_path / "calls.py"
        script.write_text(CALLS)
        started.extend(start_ranks(hosts, (2, 1), script, tmp_path, **request.param))
        rounds = Rounds(started)
        rounds.wait_for_more(1)
        return rounds

    yield make
    (tmp_path / "enough").touch()
    for status, out, err in map(finish, started):
        assert status == 0, err
        assert out.endswith("all is right\n")


def test_calls_go_on_over_connections_that_are_reset_at_any_moment(two_hosts, calls):
    rounds, choice, count = calls(two_hosts), random.Random(5), 0
    for _ in range(NUM_RESETS):
        count += reset(two_hosts, choice.randrange(2))
        threading.Event().wait(choice.random() * 2 * PAUSE_S)  # the moments are what is tried
    rounds.wait_for_more(1)
    assert count > NUM_RESETS / 2


@pytest.mark.parametrize(
    "at", [(), pytest.param((0,), marks=exhaustive), pytest.param((1,), marks=exhaustive)], ids=str
)
def test_calls_go_on_over_connections_that_something_on_the_way_resets(faulty_hosts, calls, at):
    """At both ends, or at one: the other learns of it from the next claim, or its next packet."""
    link, choice = faulty_hosts.link, random.Random(6)
    rounds = calls(faulty_hosts)
    for _ in range(NUM_RESETS):
        link.reset(*at)
        threading.Event().wait(choice.random() * 2 * PAUSE_S)
    rounds.wait_for_more(1)
    assert link.num_resets > NUM_RESETS / 2


@pytest.mark.parametrize("cut_s", [1.0, pytest.param(5.0, marks=exhaustive)])
def test_calls_go_on_after_resets_and_a_short_cut(faulty_hosts, calls, cut_s):
    link, rounds = faulty_hosts.link, calls(faulty_hosts)
    resets = link.num_resets
    link.reset()
    until(lambda: link.num_resets > resets, "a connection is reset")
    link.cut()
    threading.Event().wait(cut_s)  # the fault itself
    link.mend()
    rounds.wait_for_more(1)


def start_waiting(hosts, folder, **variables):
    script = folder / "wait.py"
    script.write_text(WAIT)
    processes = start_ranks(hosts, (1, 1), script, folder, **variables)
    for process in processes:
        assert process.stdout.readline() == "there\n"
    return processes


def test_a_cut_that_lasts_after_a_reset_is_an_error_on_both_sides(faulty_hosts, tmp_path):
    processes = start_waiting(faulty_hosts, tmp_path)
    link = faulty_hosts.link
    link.spared_ports = {int(PORT)}
    began_s = time.monotonic()
    link.reset()
    until(lambda: link.num_resets, "the connection is reset")
    link.cut()
    lines = [process.stdout.readline() for process in processes]
    assert time.monotonic() - began_s < 10.5
    for rank, line in enumerate(lines):
        assert re.match(
            rf"(Dist(Backend|Network)|PeerConnection)Error all_reduce on group 'world' \(rank {rank} of 2\)", line
        )
    assert all(re.search(r"was reset \d|cut off|nothing has come|lost the store at", line) for line in lines), lines
    link.mend()
    assert [finish(process)[0] for process in processes] == [0, 0]


def test_a_rank_that_is_killed_while_its_link_is_made_again_is_named_within_a_second(faulty_hosts, tmp_path):
    processes = start_waiting(faulty_hosts, tmp_path)
    link = faulty_hosts.link
    link.spared_ports = {int(PORT)}
    link.delay_s = 0.1  # so that it takes some tenths of a second to make it again
    link.reset()
    until(lambda: link.num_resets, "the connection is reset")
    processes[1].send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    line = processes[0].stdout.readline()
    assert time.monotonic() - killed_s < 2.0
    assert re.search(r"all_reduce on group 'world' \(rank 0 of 2\): .*rank 1 \(pid \d+ on .*has died", line), line
    assert finish(processes[0])[0] == 0
