"""Launchers, worlds that end and begin again, meshes of both libraries, and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from both_backends import BothBackends, run_program
from worlds import needs_linux

pytestmark = [needs_linux, pytest.mark.torch, pytest.mark.timeout(100)]

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist

import meshdist.torch

place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
for backend, arguments in (("meshdist", {}), ("gloo", {}), ("meshdist", place)):  # Lightning passes both
    dist.init_process_group(backend, **arguments)
    x = torch.ones(3)
    dist.all_reduce(x)
    sys.stdout.write(f"{backend} {dist.get_backend()} {x.tolist()}\\n")  # the ranks share it
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "meshdist.launch"])
def test_a_launcher_starts_the_script(launcher: str, both_backends: BothBackends, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    page = (ROOT / "docs" / "torch-backend.md").read_text()
    script.write_text(page.split("``` py\n")[1].split("```")[0] + SCRIPT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MESHDIST_", "MASTER_"))}
    done = subprocess.run(
        [sys.executable, "-m", launcher, "--nproc-per-node", "2", str(script)],
        env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "[2.0, 2.0, 2.0]" in line]
    assert sorted(said) == sorted(["gloo gloo [2.0, 2.0, 2.0]"] * 2 + ["meshdist meshdist [2.0, 2.0, 2.0]"] * 4)


@pytest.mark.parametrize("size", [2, 3])
def test_meshes_of_both_libraries(size: int, both_backends: BothBackends) -> None:
    ranks, total = [list(range(size))], size * (size + 1) / 2
    expected = (ranks, ("dp", "tp"), total, ranks, ("dp", "tp"), total)
    assert both_backends.run("meshdist", size, "meshes") == [expected] * size


@pytest.mark.parametrize("size", [2, 3])
def test_distributed_tensors_of_both_libraries(size: int, both_backends: BothBackends) -> None:
    expected = (True, True, "S(1)", True)
    assert both_backends.run("meshdist", size, "distributed_tensors") == [expected] * size


def test_meshes_of_both_libraries_are_freed(both_backends: BothBackends) -> None:
    assert both_backends.run("meshdist", 2, "other_mesh_is_freed") == [True] * 2


def test_worlds_end_and_begin_again(both_backends: BothBackends) -> None:
    meetings = [both_backends.meeting() for _ in range(3)]
    with both_backends.processes(2) as workers:
        workers.start(run_program, "meshdist", both_backends.meeting(), 2, "in_many_worlds", (meetings,))
        assert workers.gather() == [[True] * 3] * 2


def test_threads_call_at_the_same_time(both_backends: BothBackends) -> None:
    assert both_backends.run("meshdist", 3, "in_threads") == [[0.0, 1.0, 2.0, 3.0]] * 3
