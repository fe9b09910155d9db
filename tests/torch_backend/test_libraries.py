"""The scripts of docs/torch-backend.md for accelerate and Lightning: as they stand there, they train over meshdist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from worlds import needs_linux

pytestmark = [
    needs_linux,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(100),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed; pip install 'meshdist[torch]'"),
]

ROOT = Path(__file__).parents[2]
SCRIPTS = re.findall(r"``` py\n(.*?)```", (ROOT / "docs" / "torch-backend.md").read_text(), re.DOTALL)
# The ranks have drawn different weights and data; training has made the weights one.
CHECK = """
weights = next(model.parameters()).detach().flatten()
found = [torch.empty_like(weights) for _ in range(2)]
torch.distributed.all_gather(found, weights)
assert weights.abs().sum() > 0
assert torch.equal(*found), found
"""
LAST = r"^(accelerator\.end_training|torch\.distributed\.destroy_process_group)\("


@pytest.mark.parametrize(
    ("library", "line", "launcher"),
    [
        ("accelerate", "from accelerate import Accelerator", ["-m", "torch.distributed.run", "--nproc-per-node", "2"]),
        ("lightning", "from lightning.fabric import Fabric", []),
        ("lightning", "import lightning", ["-m", "meshdist.launch", "--nproc-per-node", "2"]),
    ],
    ids=["accelerate", "fabric", "trainer"],
)
def test_the_script_of_the_page_trains_over_meshdist(
    library: str, line: str, launcher: list[str], tmp_path: Path
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed, as in CI; pip install {library}")
    (script,) = (script for script in SCRIPTS if re.search(rf"^{re.escape(line)}$", script, re.MULTILINE))
    checked, count = re.subn(LAST, lambda end: CHECK + end[0], script, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "train.py").write_text(checked)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MESHDIST_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "TORCHELASTIC_"))
    }
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("meshdist ") >= 1 or "meshdistmeshdist" in done.stdout, done.stdout
    assert "without destroy_process_group" not in done.stderr
