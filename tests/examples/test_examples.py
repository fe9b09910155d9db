"""The examples: short, run on as many ranks as one likes, and each agrees with what one process computes."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLASSIC = (EXAMPLES / "classic.py").read_text()
LAUNCH = [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node"]

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
# What each says of its comparison with one process, and options with which it is over soon.
CASES = {
    "matmul_summa": (r"largest difference from a @ b in one process: \d\.\de-1\d$", ["--size", "240"]),
    "heat_2d": (r"bit for bit what one process computes: True$", ["--steps", "50"]),
    "kmeans": (r"bit for bit what one process finds: True$", ["--steps", "5"]),
    "sample_sort": (r"sorted as np.sort does: True$", ["--numbers", "5000"]),
    "nbody_ring": (r"largest difference from one process: (0\.0e\+00|\d\.\de-1\d)$", ["--bodies", "120"]),
    "heat_2d_arrays": (r"bit for bit what one process computes: True$", ["--steps", "20"]),
    "kmeans_arrays": (r"bit for bit what one process finds: True$", ["--steps", "5"]),
    "poisson_fft": (r"largest difference from the known solution: \d\.\de-1\d$", ["--cells", "50"]),
    "fft_pencils": (r"largest difference .* of the inverse: \d\.\de-1\d$", ["--cells", "15"]),
    "classic": (r"as one process: True$", []),
}


def environment():
    """Return this process's environment without what a launcher would set, and with meshdist to import."""
    left_out = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MESHDIST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(command):
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=90)


def output_of(command):
    done = run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_one_process(name):
    says, options = CASES[name]
    output = output_of([*LAUNCH, "4", str(EXAMPLES / f"{name}.py"), *options])
    assert re.search(says, output, re.MULTILINE), output


@pytest.mark.parametrize("name", ["matmul_summa", "heat_2d"])
@pytest.mark.parametrize(("ranks", "mesh"), [(1, "1 x 1"), (6, "2 x 3")])
def test_the_mesh_may_have_any_sides(name, ranks, mesh):
    says, options = CASES[name]
    output = output_of([*LAUNCH, str(ranks), str(EXAMPLES / f"{name}.py"), *options])
    assert f"mesh of {mesh}" in output
    assert re.search(says, output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("name", "ranks", "options", "message"),
    [
        ("matmul_summa", 2, ["--size", "241"], "--size must be a multiple of 2 on a mesh of 1 x 2, got 241"),
        ("nbody_ring", 2, ["--bodies", "7"], "--bodies must be a multiple of the number of ranks, 2, got 7"),
        ("sample_sort", 2, ["--numbers", "1"], "--numbers must be at least the number of ranks, 2, got 1"),
    ],
)
def test_what_cannot_be_shared_out_is_said(name, ranks, options, message):
    done = run([*LAUNCH, str(ranks), str(EXAMPLES / f"{name}.py"), *options])
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_it_is_short(name):
    most = 270 if "transformer" in name else 150
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < most


def with_imports(text, torch, dist):
    """Return the classic script with its two imports replaced."""
    changed, count = re.subn(r"^import numpy as torch .*$", torch, text, flags=re.MULTILINE)
    changed, others = re.subn(r"^import meshdist as dist .*$", dist, changed, flags=re.MULTILINE)
    assert (count, others) == (1, 1)
    return changed


@pytest.mark.usefixtures("torch")
def test_classic_script_prints_the_same_with_torch_arrays(tmp_path):
    script = tmp_path / "classic.py"
    script.write_text(with_imports(CLASSIC, "import torch", "import meshdist as dist"))
    assert output_of([*LAUNCH, "2", str(script)]) == output_of([*LAUNCH, "2", str(EXAMPLES / "classic.py")])


@pytest.mark.usefixtures("torch")
def test_classic_script_prints_the_same_under_torch(tmp_path, port):
    script = tmp_path / "classic.py"
    script.write_text(with_imports(CLASSIC, "import torch", "import torch.distributed as dist"))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.ExitStack() as ranks:
        started = [
            ranks.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    env={**environment(), **place, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        ranks.callback(lambda: [rank.kill() for rank in started])
        printed = [rank.communicate(timeout=90) for rank in started]
    assert [rank.returncode for rank in started] == [0, 0], printed
    assert printed[0][0] == output_of([*LAUNCH, "2", str(EXAMPLES / "classic.py")])
