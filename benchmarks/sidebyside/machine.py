"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

from sidebyside.libraries import Library


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def describe(versions: dict[Library, str]) -> dict[str, str]:
    """Return processor, cores, kernel, and the versions of Python, NumPy and the libraries."""
    machine = {
        "CPU": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
    }
    return machine | {library.title: version for library, version in versions.items()}
