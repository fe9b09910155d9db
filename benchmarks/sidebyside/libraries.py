"""The libraries that are compared: what their users import, and how they start ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent


class Library(NamedTuple):
    """One of the libraries.

    Attributes:
        name: On command lines, in file names and in JSON.
        title: At the head of a column.
        import_line: The import that a script with this library begins with.
        version: The expression that gives its version, after that import.
        launcher: From a number of ranks, the command that starts them; what Python is to run comes behind it.
    """

    name: str
    title: str
    import_line: str
    version: str
    launcher: Callable[[int], list[str]]


def environment() -> dict[str, str]:
    """Return the environment of everything that is measured: one thread of arithmetic for each rank, in any library."""
    paths = [str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _meshrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "meshdist.launch", "--nproc-per-node", str(ranks)]


def _torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def mpirun_path() -> str | None:
    """Return Open MPI's mpirun: the one installed next to this Python, else that of the PATH."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def _mpirun(ranks: int) -> list[str]:
    # Open MPI would bind ranks to cores; the other libraries leave that to their users, so it is off for all.
    command = [mpirun_path() or "mpirun", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if ranks > len(os.sched_getaffinity(0)):
        command.append("--oversubscribe")
    return [*command, "-n", str(ranks), sys.executable]


LIBRARIES = (
    Library("meshdist", "meshdist", "import meshdist", "meshdist.__version__", _meshrun),
    Library("torch", "torch (gloo)", "import torch.distributed", "torch.__version__", _torchrun),
    Library(
        "mpi",
        "Open MPI",
        "from mpi4py import MPI",
        "MPI.Get_library_version().partition(',')[0] + ' with mpi4py ' + __import__('mpi4py').__version__",
        _mpirun,
    ),
)
NAMES = tuple(library.name for library in LIBRARIES)
# meshdist over the MPI library that "mpi" is used with directly: what it adds to that.
OVER_MPI = Library("meshdist-mpi", "meshdist on MPI", "import mpi4py.MPI, meshdist", "meshdist.__version__", _mpirun)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter, as everything that is measured runs."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def installed(names: Iterable[str]) -> dict[Library, str]:
    """Return those of the named libraries that work here, with their versions; say in a line which are left out."""
    found = {}
    for library in (library for library in (*LIBRARIES, OVER_MPI) if library.name in names):
        probe = python(f"{library.import_line}\nprint({library.version})")
        version = probe.stdout.strip()
        if probe.returncode:
            why = (probe.stderr.strip().splitlines() or [f"Python ended with {probe.returncode}"])[-1]
        elif library.name == "mpi" and not version.startswith("Open MPI"):
            why = f"mpi4py must run on Open MPI, but runs on {version}"
        elif library.launcher is _mpirun and mpirun_path() is None:
            why = "there is no mpirun"
        else:
            found[library] = version.removeprefix("Open MPI ")
            continue
        print(f"{library.name} is left out: {why}", file=sys.stderr)
    return found
