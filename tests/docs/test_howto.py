"""docs/howto: each page has a program, that of its file, which prints what the page says."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))
PROGRAMS = sorted((ROOT / "examples" / "howto").glob("*.py"))


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"howto_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = loaded(ROOT / "docs" / "write_programs.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_prints_what_the_page_says(page, capsys):
    text = page.read_text()
    program = page.parent / writer.PROGRAM.search(text)[2]
    command, output = re.search(r"```console\n\$ ([^\n]*)\n(.*?)```", text, re.DOTALL).groups()
    assert (page.parent / re.search(r"!\[.*\]\((.*)\)", text)[1]).exists()
    assert command == f"meshrun -n 4 {program.resolve().relative_to(ROOT)}"
    dist.run(loaded(program).main, 4, timeout=30)
    assert capsys.readouterr().out == output


@pytest.mark.parametrize("page", writer.PAGES, ids=lambda page: page.stem)
def test_the_page_has_the_program_of_its_file(page):
    assert writer.written(page) == page.read_text(), "run `python docs/write_programs.py`"


def test_every_program_has_a_page():
    shown = {Path(writer.PROGRAM.search(page.read_text())[2]).name for page in PAGES}
    assert shown == {program.name for program in PROGRAMS}


def test_the_training_step_has_the_losses_of_one_rank(capsys):
    dist.run(loaded(ROOT / "examples" / "howto" / "training_step.py").main, 4)
    rng = np.random.default_rng(seed=0)
    x, target = rng.random((8, 4)), rng.random((8, 2))
    w1, w2 = rng.standard_normal((4, 6)), rng.standard_normal((6, 2))
    lines = []
    for step in range(3):
        hidden = np.maximum(x @ w1, 0)
        error = hidden @ w2 - target
        lines.append(f"step {step}: loss {np.square(error).mean():.4f}")
        grad_output = 2 * error / error.size
        grad_hidden = (grad_output @ w2.T) * (hidden > 0)
        w2 -= 0.1 * hidden.T @ grad_output
        w1 -= 0.1 * x.T @ grad_hidden
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
@pytest.mark.parametrize("name", ["training_step", "workers"])
def test_the_programs_run_as_scripts(name):
    program = ROOT / "examples" / "howto" / f"{name}.py"
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "-n", "4", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
