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
    *starts, last = done.stdout.splitlines()
    mesh, _, losses = last.partition(": ")
    return mesh, [float(loss) for loss in losses.split()], done.stderr, starts


@needs_linux
def test_three_kills_and_another_mesh_change_no_loss(tmp_path):
    meshrun = ["-m", "meshdist.launch.meshrun", "-n", "3:4", "--max-restarts", "3"]
    _, alone, _, _ = run(SCRIPT)
    arguments = ["--checkpoint", str(tmp_path), "--mesh", "2x2,3x1", "--die-at", "3,5,8"]
    mesh, losses, said, starts = run(*meshrun, SCRIPT, *arguments)
    assert mesh == "mesh 3x1"
    assert losses == pytest.approx(alone, abs=1e-10)
    assert alone[-1] < alone[0]
    assert [start.split(":")[0] for start in starts] == ["mesh 2x2", *["mesh 3x1"] * 3]
    assert starts[0].endswith("trains from step 1 on")
    assert run(SCRIPT, "--checkpoint", str(tmp_path))[3] == [f"mesh 1x1: all 12 steps are done in {tmp_path}/step-12"]
    # A file by which a rank was about to claim the folder, if it was killed in that moment, is kept for two minutes.
    kept = [path.name for path in tmp_path.iterdir() if not (path.is_file() and path.name.startswith(".saving-"))]
    assert sorted(kept) == ["step-11", "step-12"]
    causes = [line for line in said.splitlines() if "first failure: rank" in line]
    assert len(causes) == 3
    assert all("was killed by SIGKILL" in line for line in causes)
    assert [line for line in said.splitlines() if line.startswith("meshrun: start ")] == [
        f"meshrun: start {start} has 3 ranks" for start in (1, 2, 3)
    ]


@needs_linux
def test_plan_proposes_the_mesh_for_the_ranks_that_are_left(tmp_path):
    meshrun = ["-m", "meshdist.launch.meshrun", "-n", "1:2", "--max-restarts", "1"]
    mesh, losses, _, _ = run(*meshrun, SCRIPT, "--checkpoint", str(tmp_path), "--steps", "4", "--die-at", "2")
    assert (mesh, len(losses)) == ("mesh 1x1", 4)


@needs_linux
def test_without_a_folder_the_ranks_share_a_temporary_one():
    mesh, losses, _, _ = run("-m", "meshdist.launch.meshrun", "-n", "2", SCRIPT, "--steps", "2", "--mesh", "2x1")
    assert (mesh, len(losses)) == ("mesh 2x1", 2)
