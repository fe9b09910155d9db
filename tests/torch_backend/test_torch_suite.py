"""A part of torch's own tests of torch.distributed, over backend meshdist: each day another one.

torch_suite.txt has the results of all; all that pass there pass here, in a month.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

import pytest
from worlds import needs_linux

pytestmark = [
    needs_linux,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(find_spec("expecttest") is None, reason="torch's tests need expecttest"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "torch_backend" / "torch_suite.py"
LIST = SCRIPT.with_suffix(".txt")
SIZES = (2, 3, 4)
NUM_PARTS = 10
PART = "MESHDIST_TORCH_SUITE_PART"


def rows_of(size: int) -> str:
    """Return the part of the list for worlds of this size."""
    (rows,) = re.findall(rf"^{size} ranks\n(.*?)\n(?:\n|\Z)", LIST.read_text(), re.DOTALL | re.MULTILINE)
    return str(rows)


@pytest.mark.parametrize("size", SIZES)
def test_what_only_gloo_passes_has_a_reason(size: int) -> None:
    rows = rows_of(size)
    assert len(re.findall(r"^test_\w+ +passes +passes$", rows, re.MULTILINE)) > 80
    assert re.findall(r"^test_\w+ +passes +fails$", rows, re.MULTILINE) == []
    assert rows.endswith("only Gloo passes, for no known reason: none")


def test_a_part_of_torchs_own_tests_passes() -> None:
    """Set MESHDIST_TORCH_SUITE_PART, which is the day by default, to the number of a part to repeat it."""
    number = int(os.environ.get(PART, datetime.now(timezone.utc).toordinal()))
    size = SIZES[number // NUM_PARTS % len(SIZES)]
    cases = re.findall(r"^(test_\w+) +passes +passes$", rows_of(size), re.MULTILINE)[number % NUM_PARTS :: NUM_PARTS]
    options = ["--backends", "meshdist", "--world-size", str(size), "--timeout", "40", "--errors"]
    command = [sys.executable, str(SCRIPT), *options, "--match", f"^({'|'.join(cases)})$"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    again = f"to repeat it, set {PART}={number}, or run\n{shlex.join(command)}\n"
    assert done.returncode == 0, again + done.stderr
    passed = re.findall(r"^(\w+) +passes$", done.stdout, re.MULTILINE)
    assert sorted(passed) == sorted(cases), again + done.stdout
