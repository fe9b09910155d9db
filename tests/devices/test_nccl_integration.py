"""Backend nccl with the rest of the library: meshes, dry runs, logging, missing packages, imports."""

import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from standin_gpu import MACHINE

import meshdist as dist
from meshdist.backends.nccl import library
from meshdist.tensor import DTensor, Shard

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]


def on_own_gpu(program, cupy, size):
    MACHINE.num_devices = max(2, size)

    def main():
        cupy.cuda.Device(dist.get_rank()).use()
        return program()

    return dist.run(main, size, timeout=20)


def test_a_mesh_of_gpus(standin, cupy):
    def main():
        mesh = dist.init_device_mesh(
            "cuda", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "standin", "tp": "standin"}
        )
        x = mesh["tp"].all_reduce(cupy.asarray(np.full(2, float(mesh.get_rank()))))
        y = mesh["dp"].all_gather_into_tensor(cupy.zeros(4), x)
        return y.tolist()

    assert on_own_gpu(main, cupy, 4) == [[1.0, 1.0, 5.0, 5.0]] * 4


def test_every_call_is_logged_at_level_detail(standin, cupy, caplog):
    def main():
        before = dist.get_debug_level()
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            with dist.new_group(backend="standin", group_desc="on GPUs") as group:
                group.all_reduce(cupy.ones((2, 3)))
                group.all_gather([cupy.zeros(2)], cupy.ones(2))
        finally:
            dist.set_debug_level(before)

    with caplog.at_level(logging.DEBUG, "meshdist"):
        on_own_gpu(main, cupy, 1)
    calls = [record.getMessage() for record in caplog.records if "on GPUs" in record.getMessage()]
    assert any("all_reduce" in text and "48" in text for text in calls), calls
    assert any("all_gather" in text for text in calls)


def test_operations_on_arrays_are_compared_at_level_detail(standin, cupy, caplog):
    def main():
        mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",), backend_override={"dp": "standin"})
        x = DTensor.from_local(cupy.ones((2, 2)), mesh, {"dp": Shard(0)}, shape=(4, 2))
        x = x + 1
        with pytest.raises(dist.DistBackendError) as info:
            x * dist.get_rank()
        return str(info.value)

    with caplog.at_level(logging.DEBUG, "meshdist"):  # the level that ranks find where they begin
        told = on_own_gpu(main, cupy, 2)
    for said in told:
        assert "the ranks disagree" in said
        for rank in range(2):
            assert f"rank {rank} calls np.multiply(float64 (4, 2) as {{'dp': Shard(0)}}, {rank})" in said


def test_calls_and_bytes_are_counted(standin, cupy):
    def main():
        mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",), backend_override={"dp": "standin"})
        with mesh.account() as account:
            mesh["dp"].all_reduce(cupy.ones(4))
        return account.as_dict()["dp"]["all_reduce"]["nbytes"]

    assert on_own_gpu(main, cupy, 2) == [32, 32]


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl"])
def test_a_dry_run_takes_arrays_on_a_gpu(cupy, backend):
    with dist.dry_run(world_size=8, rank=3):
        dist.init_process_group(backend)
        x, whole = cupy.ones(3), cupy.zeros((8, 3))
        assert dist.all_reduce(x).tolist() == [8.0] * 3
        assert dist.all_gather_into_tensor(whole, x).tolist() == [[8.0] * 3] * 8
        dist.all_reduce(x, async_op=True).wait()
        dist.destroy_process_group()


def test_what_is_not_installed_is_said(monkeypatch):
    if find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    with pytest.raises(dist.DistBackendError, match=r"CuPy is not installed; `pip install cupy-cuda12x`"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def test_a_gpu_that_is_not_seen_is_said(cupy, monkeypatch):
    monkeypatch.setattr("meshdist.system.platform.num_gpus", lambda: 0)
    assert "no CUDA GPU: install NVIDIA's driver, or see whether CUDA_VISIBLE_DEVICES" in library.no_nccl()


def test_where_the_library_of_nccl_is_looked_for(cupy, monkeypatch, tmp_path):
    monkeypatch.setattr("meshdist.system.platform.num_gpus", lambda: 1)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libnccl.so.2").touch()
    assert library.no_nccl() is None


def test_who_has_numpy_arrays_never_loads_cupy(tmp_path):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise AssertionError('loaded')")
    program = (
        "import sys, numpy as np, meshdist as dist\n"
        "dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = np.ones(2)\n"
        "dist.all_reduce(x), dist.all_gather([np.zeros(2)], x), dist.barrier()\n"
        "dist.all_gather_object([None], 'object')\n"
        "dist.batch_isend_irecv([])\n"
        "with dist.coalescing_manager():\n    dist.all_reduce(x)\n"
        "dist.is_nccl_available()\n"
        "dist.destroy_process_group()\n"
        "assert 'cupy' not in sys.modules\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
