"""The elastic example: killed three times and moved to another mesh, it has the losses of one rank alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import needs_linux

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "elastic_training.py")

pytestmark = pytest.mark.timeout(100)


def run(*command):
    left_out = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MESHDIST_", "RESTART_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in done.stdout.partition(": ")[2].split()]


@needs_linux
def test_three_kills_and_another_mesh_change_no_loss(tmp_path):
    runs = ["--checkpoint", str(tmp_path)]
    meshrun = ["-m", "meshdist.launch.meshrun"]
    alone = run(SCRIPT, "--steps", "14")
    first = run(*meshrun, "-n", "4", "--max-restarts", "3", SCRIPT, "--mesh", "2x2", "--die-at", "3,5,8", *runs)
    assert first == pytest.approx(alone[:12], abs=1e-10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-11", "step-12"]
    second = run(*meshrun, "-n", "3", SCRIPT, "--mesh", "3x1", "--steps", "14", *runs)
    assert len(second) == 14
    assert second == pytest.approx(alone, abs=1e-10)
    assert alone[-1] < alone[0]
