"""docs/profiling.md: its script runs under meshrun, and shows a table such as the page has."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="meshrun is tried on Linux only"),
]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "profiling.md").read_text()


def test_the_script_shows_a_table_such_as_the_page_has(tmp_path):
    (tmp_path / "step.py").write_text(re.findall(r"``` py\n(.*?)```", PAGE, re.DOTALL)[0])
    arguments = re.findall(r"`meshrun (-n 4 step.py)`", PAGE)[0].split()
    command = [sys.executable, "-m", "meshdist.launch.meshrun", *arguments]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
    table = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)[0]
    assert outline(done.stdout) == outline(table)
    assert (tmp_path / "trace.json").stat().st_size > 0


def outline(table):
    """Return what a table has whatever the numbers are: its head, which calls how often, and what is said below."""
    lines = [
        line for line in table.splitlines() if not line.startswith("of that, set-up of groups")
    ]  # if these take long
    head, *rows, share, slowest = lines
    return head.split(), sorted(row.split()[:3] for row in rows), share.partition(":")[0], slowest.partition(":")[0]
