"""The logging backend: it is short, works, and logs every call and message."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "logging_backend.py"

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


def test_it_fits_under_60_lines():
    assert len(SCRIPT.read_text().splitlines()) < 60


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_call_and_message_is_logged(ranks):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MESHDIST_", "RANK", "MASTER_"))}
    done = subprocess.run(
        [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", str(ranks), str(SCRIPT)],
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    logged = [re.fullmatch(r"rank (\d): (.+), (\d+) bytes, \d+ us", line) for line in done.stdout.splitlines()]
    assert all(logged), done.stdout
    expected = [(str(rank), "all_reduce", "32") for rank in range(ranks)]
    if ranks > 1:
        expected += [("0", "send to 1", "32"), ("1", "recv from 0", "32")]
    assert sorted(line.groups() for line in logged) == sorted(expected)
