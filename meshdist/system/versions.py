"""What runs here: versions, the machine, and whether the compiled core is used."""

from __future__ import annotations

import os
import platform

import numpy as np

from meshdist import core
from meshdist._version import __version__
from meshdist.system.platform import available_cores

_OPTIONAL = ("mpi4py", "cupy-cuda12x", "cupy-cuda13x", "ml_dtypes", "networkx")


def versions() -> dict[str, str]:
    """Return the machine and what is installed: processor, cores, kernel, Python, NumPy, meshdist and its core."""
    return {
        "CPU": _cpu_model(),
        "cores": _cores(),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "meshdist": __version__,
        "compiled core": core.status(),
    }


def show_versions() -> None:
    """Print the facts that a bug report needs: versions, the machine, and whether the compiled core is used.

    Example:
        >>> from meshdist import show_versions
        >>> show_versions()  # doctest: +ELLIPSIS
        CPU: ...
        meshdist: ...
        compiled core: ...
    """
    from importlib.metadata import PackageNotFoundError, version  # which takes long to import

    found = versions()
    for package in _OPTIONAL:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    width = max(map(len, found)) + 1
    for name, value in found.items():
        print(f"{name + ':':{width}} {value}")


def _cores() -> str:
    # A launcher may have bound this rank to some cores.
    mine, all_ = available_cores(), os.cpu_count() or 1
    return f"{mine} of {all_}" if mine < all_ else str(all_)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
