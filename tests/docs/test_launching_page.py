"""docs/launching.md: its table of options is meshrun's, and its commands are understood."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text()


def test_table_of_options_is_that_of_meshrun():
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    known = set(re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?(--[a-z-]+)", shown, re.MULTILINE))
    table = PAGE.partition("## Options")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(--[a-z-]+)`", table)) == known


def test_every_job_file_is_on_a_page():
    clusters = (ROOT / "docs" / "clusters.md").read_text()
    for path in (ROOT / "examples" / "cluster").iterdir():
        if path.is_file():
            assert f"(../examples/cluster/{path.name})" in PAGE + clusters


def test_every_command_of_the_page_is_understood(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    commands = re.findall(r"meshrun ((?:--[^`\n]*? )+train\.py)", PAGE)
    assert len(commands) >= 3
    for words in commands:
        # One more option, a wrong one: it is refused, and only it.
        command = [sys.executable, "-m", "meshdist.launch.meshrun", *words.replace("... ", "").split()[:-1]]
        done = subprocess.run(
            [*command, "--bogus=1", "train.py"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stderr) == (
            2,
            "meshrun: --bogus is not an option of meshrun; see meshrun --help\n",
        )
