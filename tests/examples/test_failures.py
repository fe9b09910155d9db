"""The failing programs of examples/failures: they say what docs/hangs.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "failures"
PAGE = (ROOT / "docs" / "hangs.md").read_text()
SHOWN = re.findall(r"```console\n\$ meshrun -n (\d+) (\w+)\.py\n(.*?)```", PAGE, re.DOTALL)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


def without_what_changes(text: str) -> str:
    """Return `text` without pids, hosts and times, and with one rank in the place of whichever was first to say it."""
    text = text.replace("meshdist.errors.", "")  # of the second to fail, meshrun shows the name alone
    text = re.sub(r"\(pid \d+ on [^)]*\)", "(PID)", text)
    text = re.sub(r"\(rank \d+ of (\d+)\)", r"(RANK of \1)", text)
    text = re.sub(r"group '(rows|columns)' \(RANK", r"group 'ITS FIRST' (RANK", text)
    text = re.sub(r", as of \d+\.\d s ago:", ":", text)  # of the ranks that report, the first has the latest state
    return re.sub(r"for \d+\.\d s", "for T s", text)


def test_every_program_is_shown():
    assert {name for _, name, _ in SHOWN} == {path.stem for path in SCRIPTS.glob("*.py")}


@pytest.mark.parametrize(("ranks", "name", "shown"), SHOWN, ids=[name for _, name, _ in SHOWN])
def test_a_program_fails_as_the_page_shows(ranks, name, shown):
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", ranks, str(SCRIPTS / f"{name}.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 1 or name == "killed", done.stderr
    said = without_what_changes(done.stderr)
    for line in shown.splitlines():
        assert line == "..." or without_what_changes(line) in said, f"{line}\nis not in\n{done.stderr}"
