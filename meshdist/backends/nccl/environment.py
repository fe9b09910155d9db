"""What can be known of NCCL without loading it, or CuPy: whether they are there, and a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_INSTALL = "`pip install 'meshdist[cuda]'` brings it (cupy-cuda12x, or cupy-cuda13x for CUDA 13)"
_INSTALL_NCCL = "`pip install nvidia-nccl-cu12` brings it (nvidia-nccl-cu13 for CUDA 13)"
_SYSTEM = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda*/lib64",
    "/opt/cuda/lib64",
)


def no_nccl() -> str | None:
    """Return what arrays on a GPU lack here to be carried by NCCL, and how to get it; None where all is there."""
    from meshdist.launch.devices import num_gpus

    if "cupy" not in sys.modules and find_spec("cupy") is None:
        return f"CuPy is not installed; {_INSTALL}"
    if num_gpus() == 0:
        return (
            "this process sees no CUDA GPU: install NVIDIA's driver, or see whether CUDA_VISIBLE_DEVICES, or the"
            " container, hides the GPUs"
        )
    return None if _has_library() else f"the NCCL library is not installed; {_INSTALL_NCCL}"


def _has_library() -> bool:
    # Where pip puts it, and else where CuPy or the loader of the system look.
    try:
        if find_spec("nvidia.nccl") is not None:
            return True
    except ModuleNotFoundError:  # there is no package `nvidia`
        return any(_libraries())
    return any(_libraries())


def _libraries() -> Iterator[Path]:
    given = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    roots = [Path(os.environ[name]) for name in ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME") if name in os.environ]
    folders = [Path(folder) for folder in given if folder]
    folders += [root / part for root in roots for part in ("lib", "lib64")]
    for pattern in _SYSTEM:
        folders += Path("/").glob(pattern[1:])
    for folder in folders:
        yield from folder.glob("libnccl.so*")
