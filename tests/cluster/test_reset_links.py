"""Connections between two hosts that are reset at any moment: they are made again, and every byte comes once."""

import random
import subprocess
import threading

import pytest
from test_faulty_links import CALLS, Rounds
from test_gloo_between_hosts import PORT, finish, start_ranks

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
exhaustive = pytest.mark.exhaustive
ENCRYPTION = {"encrypted": {}, "in the clear": {"MESHDIST_ENCRYPTION": "off"}}
# Between two resets.
PAUSE_S = 0.05
NUM_RESETS = 20


def reset(hosts, host):
    """Have the kernel of one host reset its connections with ranks; return how many these were."""
    words = ["-K", "-tnH", "state", "established", f"( sport != :{PORT} and dport != :{PORT} )"]
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
