"""The launchers whose variables are known, in one table: what each calls the rank, the size and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """What one launcher sets in the environment of the processes that it starts.

    Attributes:
        name: What messages call it.
        signs: Variables any of which says that it started this process.
        rank: The variable that holds the rank.
        size: Variables that may hold the number of ranks; the first that is set counts.
        local_rank: The variable that holds the place among the ranks of this host, if there is one.
        local_size: The variable that holds how many ranks this host has, if there is one.
        job: Variables that are equal for the ranks of one start and differ from start to start.
        same_start: Variables that, where set, hold the rank as well.
        how_to_set: How a variable is given to all ranks.

    Example:
        >>> find_launcher({"OMPI_COMM_WORLD_RANK": "3"}).name
        'mpirun (Open MPI)'
    """

    name: str
    signs: tuple[str, ...]
    rank: str
    size: tuple[str, ...]
    local_rank: str | None = None
    local_size: str | None = None
    job: tuple[str, ...] = ()
    same_start: tuple[str, ...] = ()
    how_to_set: str = "export NAME=VALUE"


SLURM = Launcher(
    name="srun (Slurm)",
    # Only in what srun starts. SLURM_PROCID and SLURM_NTASKS are in the batch script as well, which is no rank.
    signs=("SLURM_STEP_NODELIST",),
    rank="SLURM_PROCID",
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank="SLURM_LOCALID",
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    same_start=("PMI_RANK", "PMIX_RANK"),
    how_to_set="export NAME=VALUE before srun",
)

KUBERNETES = Launcher(
    name="Kubernetes (Indexed Job)",
    signs=("JOB_COMPLETION_INDEX",),
    rank="JOB_COMPLETION_INDEX",
    size=("WORLD_SIZE",),
    how_to_set="env: in the pod template",
)

LAUNCHERS: tuple[Launcher, ...] = (
    # Those of MPI come first: within a Slurm job, they start a helper on each host by srun, whose variables stay.
    Launcher(
        name="mpirun (Open MPI)",
        signs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        same_start=("PMIX_RANK",),
        how_to_set="mpirun -x NAME=VALUE",
    ),
    Launcher(
        name="mpiexec (MPICH, Hydra)",
        signs=("MPI_LOCALRANKID",),
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        how_to_set="mpiexec -genv NAME VALUE",
    ),
    SLURM,
    Launcher(
        name="a launcher with PMI",
        signs=("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank="PMI_LOCAL_RANK",
        local_size="PMI_LOCAL_SIZE",
    ),
    # PMIx tells the number of ranks to its clients alone, not in the environment.
    Launcher(
        name="a launcher with PMIx",
        signs=("PMIX_RANK",),
        rank="PMIX_RANK",
        size=("WORLD_SIZE",),
        job=("PMIX_NAMESPACE",),
    ),
    KUBERNETES,
)
"""All of them; where the signs of several are there, the first counts."""


def find_launcher(environ: Environment) -> Launcher | None:
    """Return the launcher that started the process with this environment, None if none of the table did."""
    for launcher in LAUNCHERS:
        if any(environ.get(sign) for sign in launcher.signs):
            return launcher
    return None
