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
import importlib.util, os, sys
import numpy as np
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
if dist.get_world_size() == 2 and importlib.util.find_spec("autograd") is not None:
    from gradient_programs import gradients_through_collectives

    found, want = (
        gradients_through_collectives(dist.init_device_mesh(device, (2,), mesh_dim_names=("tp",)), module)
        for device, module in (("cuda", cupy), ("cpu", np))
    )
    for name, arrays in want.items():
        for here, there in zip(found[name], arrays, strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-8, atol=1e-10, err_msg=name)
gloo = dist.new_group(backend="gloo")
programs.every_collective(cupy, gloo, "float32", ((2, 3),), skipped=programs.OF_SEVERAL_GPUS)
dist.barrier()
print(f"rank {dist.get_rank()} is done")
dist.destroy_process_group()
"""


def started(num_ranks, *args, variables=None):
    """Run a program, behind options of meshrun, on so many ranks, with a hard deadline, and return how it ended."""
    path = os.pathsep.join([str(ROOT), str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **(variables or {}), "PYTHONPATH": path}
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", str(num_ranks), *args]
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
    assert re.search(r"ranks 0 and 1 share one GPU, .*but NCCL needs one for each", output), output[-4000:]


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


@pytest.fixture
def shared_gpu(gpus, nccl_version):
    """Run a program on ranks that share a GPU; return its exit status and output."""
    gpus(1)
    if nccl_version < 23000:
        pytest.skip(f"NCCL lets ranks share a GPU from 2.30 on, this is {nccl_version}")
    return lambda num_ranks, program, *args, **more: started(
        num_ranks, str(program), *args, variables={**SHARED, **more}
    )


@pytest.mark.parametrize("mesh", ["2x1", "1x2", "2x2"])
def test_training_on_a_shared_gpu_gives_the_losses_of_gloo(shared_gpu, tmp_path, mesh):
    import json

    num_ranks = {"2x1": 2, "1x2": 2, "2x2": 4}[mesh]
    example = ROOT / "examples" / "train_digits.py"
    found = []
    for options in (["--backend", "cpu:gloo,cuda:nccl", "--device", "cuda"], ["--backend", "gloo"]):
        run = tmp_path / "run.json"
        options += ["--mesh", mesh, "--steps", "50", "--dtype", "float64", "--json", str(run)]
        status, output = shared_gpu(num_ranks, example, *options)
        assert status == 0, output[-4000:]
        found.append(json.loads(run.read_text())["losses"])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, "--mesh 1x2x1 --sequence-parallel"),
        (2, "--mesh 1x1x2"),
        (4, "--mesh 2x2x1 --zero"),
    ],
)
def test_a_transformer_has_the_losses_of_gloo(shared_gpu, tmp_path, num_ranks, options):
    import json

    pytest.importorskip("autograd")
    example = ROOT / "examples" / "train_transformer.py"
    common = ["--steps", "5", "--layers", "2", "--sample", "3", "--dtype", "float64", *options.split()]
    runs = []
    for device in (["--device", "cuda"], ["--backend", "gloo"]):
        run = tmp_path / "run.json"
        status, output = shared_gpu(num_ranks, example, *device, *common, "--json", str(run))
        assert status == 0, output[-4000:]
        runs.append(json.loads(run.read_text()))
    assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-9)
    assert runs[0]["sample"] == runs[1]["sample"]


FAULTS = """
import os, signal, sys, time
import cupy
import numpy as np
import meshdist as dist

fault = sys.argv[1]
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once a rank has failed
cupy.cuda.Device(0).use()
short = fault in ("absent", "blocked")
dist.init_process_group("cpu:gloo,cuda:nccl", timeout=60, device_id=0)
rank = dist.get_rank()
group = dist.new_group(backend="nccl", device_id=0, timeout=4 if short else 60)
x, wide = cupy.ones(1 << 20), [cupy.zeros(1 << 20) for _ in range(2)]
group.all_reduce(x)
cupy.cuda.Device().synchronize()
dist.all_reduce(np.zeros(1))
began = time.monotonic()


def told(call):
    try:
        call()
    except Exception as error:
        print(f"rank {rank} after {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}", flush=True)
    else:
        print(f"rank {rank}: no error", flush=True)


if fault == "killed":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told(lambda: group.all_reduce(x, async_op=True).wait(30))
    told(lambda: group.all_reduce(x))
    os._exit(0)
if fault == "raised":
    if rank == 1:
        raise SystemExit("rank 1 gives up")
    told(lambda: group.all_reduce(x, async_op=True).wait(30))
    os._exit(0)
if fault == "absent":
    if rank == 1:
        time.sleep(6)
    told(lambda: group.all_reduce(x, async_op=True).wait(30))
if fault == "blocked":
    if rank == 0:
        told(lambda: group.all_to_all_single(cupy.zeros(4), cupy.ones(4)))
    else:
        time.sleep(6)
if fault == "mismatch":
    told(lambda: group.all_reduce(x if rank == 0 else x[:7]))
if fault == "memory":
    if rank == 1:
        pool = cupy.get_default_memory_pool()
        pool.free_all_blocks()
        pool.set_limit(size=pool.total_bytes())
    told(lambda: group.all_gather(wide, x, async_op=True).wait(30))
    os._exit(0)
dist.destroy_process_group(group)
group = dist.new_group(backend="nccl", device_id=0, timeout=30)
y = cupy.ones(3)
group.all_reduce(y)
print(f"rank {rank}: again {y.tolist()}", flush=True)
dist.destroy_process_group()
dist.init_process_group("cpu:gloo,cuda:nccl", timeout=60, device_id=0)
y = cupy.ones(3)
dist.all_reduce(y)
print(f"rank {rank}: init again {y.tolist()}", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def faults(tmp_path):
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    return path


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed", r"rank 0 after \d\.\d s: \w+: all_reduce on group .*rank 1 (has died|.*SIGKILL)"),
        ("raised", r"rank 0 after \d\.\d s: \w+: all_reduce on group .*rank 1 "),
        ("memory", r"rank 0 after \d\.\d s: \w+: all_gather on group .*OutOfMemoryError"),
    ],
)
def test_a_rank_that_fails_is_named(shared_gpu, faults, fault, words):
    _, output = shared_gpu(2, faults, fault)
    assert re.search(words, output), output[-4000:]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("absent", r"rank 0 after [45]\.\d s: DistTimeoutError: all_reduce on group .*timed out after 4 s"),
        ("blocked", r"rank 0 after [45]\.\d s: DistTimeoutError: all_to_all_single on group .*timed out after 4 s"),
        ("mismatch", r"(?s)rank \d after [^\n]*DistBackendError: all_reduce[^\n]* disagree.*\[1048576\].*\[7\]"),
    ],
)
def test_a_new_group_and_a_new_world_work_after_a_failure(shared_gpu, faults, fault, words):
    status, output = shared_gpu(2, faults, fault, MESHDIST_DEBUG="DETAIL" if fault == "mismatch" else "OFF")
    assert re.search(words, output), output[-4000:]
    assert output.count("again [2.0, 2.0, 2.0]") == 4, output[-4000:]
    assert status == 0


STREAMS = """
import cupy
import meshdist as dist

cupy.cuda.Device(0).use()
dist.init_process_group("nccl", timeout=60, device_id=0)
rank = dist.get_rank()

# The example of torch's documentation.
output, other = cupy.full(1, float(rank)), cupy.cuda.Stream(non_blocking=True)
handle = dist.all_reduce(output, async_op=True)
handle.wait()
here = cupy.cuda.get_current_stream().record()
with other:
    other.wait_event(here)
    output += 100
other.synchronize()
print(f"rank {rank}: {output.tolist()}")

x, whole, stream = cupy.ones(3), cupy.zeros(6), cupy.cuda.Stream(non_blocking=True)
dist.all_gather_into_tensor(whole, x)
dist.all_reduce(cupy.zeros(3))
with stream:
    x *= 1
    x += 0
    stream.synchronize()
    stream.begin_capture()
    x *= 2
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    x += 1
    dist.all_gather_into_tensor(whole, x)
    graph = stream.end_capture()
    graph.launch()
    graph.launch()
    stream.synchronize()
print(f"rank {rank}: graph {x.tolist()} {whole.tolist()}")
dist.all_reduce(x)
print(f"rank {rank}: after the graph {x.tolist()}", flush=True)
dist.destroy_process_group()
"""


def test_streams_and_graphs(shared_gpu, tmp_path):
    path = tmp_path / "streams.py"
    path.write_text(STREAMS)
    status, output = shared_gpu(2, path)
    assert status == 0, output[-4000:]
    for rank in range(2):
        assert f"rank {rank}: [101.0]" in output, output[-4000:]
        # 1 becomes 2 * 2 * 2 + 1, and that becomes 18 * 2 * 2 + 1.
        assert f"rank {rank}: graph {[73.0] * 3} {[73.0] * 6}" in output, output[-4000:]
        assert f"rank {rank}: after the graph {[146.0] * 3}" in output, output[-4000:]


THROUGH_MPI = """
import device_programs as programs
import meshdist as dist
import cupy

cupy.cuda.Device(0).use()
dist.init_process_group("mpi", timeout=60)
for dtype in ("float32", "bfloat16"):
    programs.every_collective(cupy, dist.group.WORLD, dtype, ((2, 3),), skipped=programs.OF_SEVERAL_GPUS)
programs.every_op(cupy, dist.group.WORLD, "float64")
print(f"rank {dist.get_rank()} is done", flush=True)
dist.destroy_process_group()
"""


def test_arrays_by_way_of_mpi(gpus, tmp_path):
    import meshdist as dist

    gpus(1)
    if not dist.is_mpi_available():
        pytest.skip("there is no MPI here")
    path = tmp_path / "mpi.py"
    path.write_text(THROUGH_MPI)
    status, output = started(2, "--launcher", "mpi", str(path))
    assert status == 0, output[-4000:]
    assert output.count("is done") == 2
