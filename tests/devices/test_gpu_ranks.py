"""Backend nccl on real GPUs, by several ranks: on one GPU where NCCL lets them, and on one for each."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
# Ranks that share a GPU may wait for each other's kernels: little of it for each.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
DEADLINE_S = 240
SUITE = """
import os, sys
import device_programs as programs
import meshdist as dist
import cupy

local_rank = int(os.environ["LOCAL_RANK"])
device = 0 if sys.argv[1] == "shared" else local_rank
cupy.cuda.Device(device).use()
dist.init_process_group("cpu:gloo,cuda:nccl", timeout=60, device_id=device)
group = dist.new_group(backend="nccl", device_id=device)
for dtype, strided in (("float32", False), ("bool", False), ("int16", True), ("bfloat16", True), ("complex128", False)):
    programs.every_collective(cupy, group, dtype, strided=strided)
for dtype in ("float32", "float16", "int64", "int16", "bool", "complex64"):
    programs.every_op(cupy, group, dtype)
programs.every_other_call(cupy, group)
programs.factors(cupy, group)
programs.without_change(cupy, group)
programs.messages(cupy, group)
gloo = dist.new_group(backend="gloo")
programs.every_collective(cupy, gloo, "float32", ((2, 3),), skipped=programs.OF_SEVERAL_GPUS)
dist.barrier()
print(f"rank {dist.get_rank()} is done")
dist.destroy_process_group()
"""


def started(num_ranks, program, *args, variables=None):
    """Run a program on so many ranks, with a hard deadline, and return how it ended."""
    path = os.pathsep.join([str(ROOT), str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **(variables or {}), "PYTHONPATH": path}
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", str(num_ranks), program, *args]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"not done after {DEADLINE_S} s:\n{output[-4000:]}")
    return process.returncode, output


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "suite.py"
    path.write_text(SUITE)
    return str(path)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_that_share_a_gpu(gpus, nccl_version, suite, num_ranks):
    gpus(1)
    if nccl_version < 23000:
        pytest.skip(f"NCCL lets ranks share a GPU from 2.30 on, this is {nccl_version}")
    status, output = started(num_ranks, suite, "shared", variables=SHARED)
    assert status == 0, output[-4000:]
    assert output.count("is done") == num_ranks


def test_ranks_that_share_a_gpu_and_must_not(gpus, suite):
    gpus(1)
    status, output = started(2, suite, "shared", variables={"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    assert status != 0
    assert re.search(r"ranks 0 and 1 use one GPU, .*and NCCL wants one for each", output), output[-4000:]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_gpu_for_each_rank(gpus, suite, num_ranks):
    gpus(num_ranks)
    status, output = started(num_ranks, suite, "own")
    assert status == 0, output[-4000:]
    assert output.count("is done") == num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_training_gives_the_losses_of_gloo(gpus, tmp_path, num_ranks):
    import json

    gpus(num_ranks)
    example = str(ROOT / "examples" / "train_digits.py")
    found = []
    for options in (["--backend", "nccl", "--device", "cuda"], ["--backend", "gloo"]):
        run = tmp_path / "run.json"
        status, output = started(
            num_ranks, example, *options, "--steps", "50", "--dtype", "float64", "--json", str(run)
        )
        assert status == 0, output[-4000:]
        found.append(json.loads(run.read_text())["losses"])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_a_rank_that_dies_is_missed_by_the_others(gpus, tmp_path):
    gpus(2)
    path = tmp_path / "dies.py"
    path.write_text(
        "import os\nimport cupy\nimport meshdist as dist\n"
        "rank = int(os.environ['RANK'])\n"
        "cupy.cuda.Device(rank).use()\n"
        "dist.init_process_group('cpu:gloo,cuda:nccl', timeout=60)\n"
        "x = cupy.ones(4)\n"
        "dist.all_reduce(x)\n"
        "if rank == 1:\n    os._exit(0)\n"
        "try:\n    dist.all_reduce(x, async_op=True).wait(30)\n"
        "except dist.DistError as error:\n    print('missed:', error)\n"
        "os._exit(0)\n"
    )
    _, output = started(2, str(path))
    assert "missed: all_reduce on group 'world' (rank 0 of 2)" in output, output[-4000:]
