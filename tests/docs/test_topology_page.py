"""The programs of docs/topology.md print what it says, and its files are topologies."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshdist

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "topology.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", PAGE, re.DOTALL)
FILES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.timeout(60)


def test_every_program_comes_with_its_output():
    assert len(PROGRAMS) == PAGE.count("```python") == 4


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_program_prints_what_the_page_says(program, output):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output


@pytest.mark.parametrize(
    ("text", "hosts"), [*zip(FILES, ({"node0": 8, "node1": 8, "node2": 8, "big": 4}, {"box": 2}), strict=True)]
)
def test_file_is_a_topology(text, hosts, tmp_path):
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli", reason="Python 3.10 reads TOML by tomli")
    path = tmp_path / "machine.toml"
    path.write_text(text)
    found = meshdist.Topology.load(path)
    assert {host: len(ranks) for host, ranks in found.hosts.items()} == hosts
