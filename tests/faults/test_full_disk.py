"""A disk without room, in a mount namespace of the test's own: an error that names the file, and nothing left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]

SCRIPT = """
import os, sys
import numpy as np
import meshdist as dist
from meshdist.checkpoint import save

def meet(rank):
    try:
        dist.init_process_group("gloo", f"file://{os.getcwd()}/disk/store", rank=rank, world_size=2, timeout=5)
    except dist.DistError as error:
        print(type(error).__name__, error, flush=True)

def work(rank):
    dist.init_process_group("gloo", timeout=20)
    try:
        save("disk/runs", {"w": np.ones(1000)}, step=1)
    except OSError as error:
        print("OSError", error, flush=True)
    assert dist.all_reduce(np.ones(3)).sum() == 6  # the ranks go on
    try:  # its record has no room either
        dist.all_reduce(np.ones(3 + rank))
    except dist.DistError as error:
        print(type(error).__name__, str(error).partition(";")[0].partition("\\n")[0], flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    dist.spawn(globals()[sys.argv[1]], nprocs=2)
    print(sorted(os.listdir("disk")), sorted(os.listdir("disk/runs")))
"""


@pytest.fixture
def with_full_disk(tmp_path):
    """Run a function of the script where the folder `disk` has no room; return what it printed, and its stderr."""
    if shutil.which("unshare") is None:
        pytest.skip("needs the program unshare (util-linux)")
    (tmp_path / "disk").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    mount = (
        'mount -t tmpfs -o size=64k tmpfs disk && mkdir disk/runs disk/tmp && { cat /dev/zero > disk/full; exec "$@"; }'
    )
    within = ["unshare", "-m", "sh", "-c", mount, "sh"]
    can = subprocess.run([*within, "true"], cwd=tmp_path, capture_output=True, text=True, check=False)
    if can.returncode != 0:
        pytest.skip(f"a disk of one's own cannot be made here: {can.stderr.strip()}")

    def run(name):
        places = {"TMPDIR": str(tmp_path / "disk/tmp"), "MESHDIST_FLIGHT_RECORDER_DIR": str(tmp_path / "disk/tmp")}
        done = subprocess.run(
            [*within, sys.executable, "script.py", name],
            cwd=tmp_path,
            env={**os.environ, **places, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        *lines, left = done.stdout.splitlines()
        stores = ["store"] * (name == "meet")
        assert left == f"{['full', 'runs', *stores, 'tmp']} []", done
        return lines, done.stderr

    return run


def test_ranks_that_meet_in_a_file_on_a_full_disk(with_full_disk):
    lines, _ = with_full_disk("meet")
    assert len(lines) == 2
    assert all(line.startswith("DistStoreError") and "disk/store" in line for line in lines), lines
    assert "No space left on device" in lines[0]


def test_a_checkpoint_and_records_on_a_full_disk(with_full_disk):
    lines, err = with_full_disk("work")
    assert len(lines) == 4, (lines, err)
    assert sum("No space left on device" in line and "disk/runs" in line for line in lines[:2]) == 2, lines
    assert sum("the ranks disagree" in line for line in lines[2:]) == 2, lines
    assert "No space left on device" in err
    assert "Traceback" not in err
