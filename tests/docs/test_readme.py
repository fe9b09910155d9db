"""The README: its programs print what it says, its two commands are what CI runs, its links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text()
LAUNCHERS = {"meshrun": ["-m", "meshdist.launch.meshrun"], "python": []}
SECTION = re.compile(r"```python\n# (\S+\.py)\n(.*?)```\s+```console\n\$ (.*?)\n(.*?)```", re.DOTALL)


def programs():
    """Return (file name, text, command, output) of each program in the README."""
    return [(name, f"# {name}\n{body}", command, output) for name, body, command, output in SECTION.findall(README)]


def normal(line):
    """Return `line` without the rank that says it: of ranks that fail alike, any may be the first to be heard."""
    return re.sub(r"\(rank \d+ of ", "(rank N of ", line.strip())


def test_every_program_comes_with_its_command_and_output():
    assert len(programs()) == README.count("```python") >= 3
    assert README.count("```console") == len(programs())


@pytest.mark.parametrize(("name", "text", "command", "output"), programs(), ids=[program[0] for program in programs()])
def test_program_prints_what_the_readme_says(name, text, command, output, tmp_path):
    (tmp_path / name).write_text(text)
    launcher, *arguments = shlex.split(command)
    assert arguments[-1] == name
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    shown = sorted(normal(line) for line in output.splitlines())
    printed = sorted(normal(line) for line in done.stdout.splitlines())
    if "..." in shown:
        assert set(shown) - {"..."} <= set(printed), done.stdout
        assert done.returncode != 0
    else:
        assert shown == printed
        assert done.returncode == 0


@pytest.mark.parametrize(
    ("mark", "main_part"),
    [("job", r"\.venv/bin/meshrun -n 4 \S+\.py .*"), ("tests", r".* -m pytest -n 4 --dist loadfile")],
)
def test_command_is_one_line_that_sets_up_and_runs(mark, main_part):
    blocks = re.findall(rf"<!-- ci: {mark} -->\n```sh\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    assert blocks[0].count("\n") == 1
    make, install, run = blocks[0].strip().split(" && ")
    assert make == "python3 -m venv .venv"
    assert re.fullmatch(r'\.venv/bin/pip install -q -e "\.\[\w+\]"', install)
    assert re.fullmatch(main_part, run)


def test_the_job_prints_what_the_readme_says():
    command, output = re.search(
        r"<!-- ci: job -->\n```sh\n.* && (.*)\n```\s+```text\n(.*?)```", README, re.DOTALL
    ).groups()
    launcher, *arguments = shlex.split(command)
    assert launcher == ".venv/bin/meshrun"
    done = subprocess.run(
        [sys.executable, *LAUNCHERS["meshrun"], *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    shown, printed = output.splitlines(), done.stdout.splitlines()
    # All but the losses and the accuracy, which are rounded otherwise by other libraries, and the speed.
    words = [
        [re.sub(r"(loss|accuracy) [\d.]+|\d+(?= steps/s|% of)", r"\1", line) for line in lines]
        for lines in (shown, printed)
    ]
    assert words[0] == words[1]
    losses = [[float(loss) for loss in re.findall(r"loss ([\d.]+)", "\n".join(lines))] for lines in (shown, printed)]
    assert losses[0] == pytest.approx(losses[1], abs=0.005)


def test_ci_runs_the_two_commands():
    listed = subprocess.run(
        ["bash", ROOT / ".ci" / "run", "--commands"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert listed.splitlines() == [
        re.search(rf"<!-- ci: {mark} -->\n```sh\n(.*)\n```", README).group(1) for mark in ("job", "tests")
    ]


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()]
    assert missing == []
