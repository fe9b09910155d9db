"""The programs of docs/migration.md print what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text()
SECTION = re.compile(r"```python\n(# (\S+\.py)\n.*?)```\s+```console\n\$ meshrun (.*?)\n(.*?)```", re.DOTALL)
PROGRAMS = SECTION.findall(PAGE)

pytestmark = pytest.mark.timeout(90)


def test_every_program_comes_with_its_command_and_output():
    assert len(PROGRAMS) == PAGE.count("```python") >= 2


@pytest.mark.parametrize(("text", "name", "arguments", "output"), PROGRAMS, ids=[program[1] for program in PROGRAMS])
def test_program_prints_what_the_page_says(text, name, arguments, output, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "meshdist.launch.meshrun", *shlex.split(arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(output.splitlines())


@pytest.mark.parametrize("variables", [{}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}])
@pytest.mark.parametrize("standalone", [[], ["--standalone"]])
@pytest.mark.usefixtures("torch")
def test_torchrun_starts_the_same_program(tmp_path, monkeypatch, variables, standalone, port):
    monkeypatch.delenv("MESHDIST_AGENT_STORE", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text, name, arguments, output = PROGRAMS[0]
    (tmp_path / name).write_text(text)
    # On a terminal torchrun mixes what the ranks print; in its logs each has a file.
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--log-dir=logs",
        "--redirects=1",
        *(standalone or [f"--master-port={port}"]),
        *shlex.split(arguments.replace("-n ", "--nproc-per-node ")),  # the page has meshrun's short form
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stderr
    assert [entry for folder in tmp_path.glob("meshdist-torchrun-*") for entry in folder.iterdir()] == []
    printed = [path.read_text() for path in (tmp_path / "logs").glob("**/stdout.log")]
    assert sorted(printed) == output.splitlines(keepends=True)
