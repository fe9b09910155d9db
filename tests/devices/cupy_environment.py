"""A Python with CuPy and NCCL, for what can be asked of them without a GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import install_step, made_once

VARIABLE = "MESHDIST_CUPY"
PACKAGES = ("cupy-cuda12x>=14", "nvidia-nccl-cu12>=2.20")
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def python() -> str:
    """Return this Python where it has CuPy, else that of an environment that is made once and kept; or skip."""
    if importlib.util.find_spec("cupy") is not None:
        return sys.executable
    if os.environ.get(VARIABLE) != "1":
        pytest.skip(f"CuPy is not installed; {VARIABLE}=1 installs it, and NCCL, in an environment of its own (900 MB)")
    folder = ROOT / ".pytest_cache" / "cupy" / f"{sys.version_info.major}.{sys.version_info.minor}"
    made = folder / "bin" / "python"
    with made_once(folder) as is_new:
        if is_new:
            install_step("CuPy", sys.executable, "-m", "venv", "--without-pip", str(folder))
            install_step("CuPy", sys.executable, "-m", "pip", "--python", str(made), "install", "-q", *PACKAGES)
    return str(made)


def run(script: str) -> str:
    """Run a script of this folder there; return what it prints."""
    here = Path(__file__).parent
    packages = [path for path in sys.path if path.endswith("-packages")]
    path = os.pathsep.join([str(ROOT), str(here), *packages])
    done = subprocess.run(
        [python(), str(here / script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
