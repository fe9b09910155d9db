"""The known launchers: the variables each sets for the rank, the size and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """The variables that a launcher sets in the environment of the processes that it starts."""

    name: str  # its name in errors and logs
    signs: tuple[str, ...]  # variables any of which shows that it started this process
    rank: str  # the variable with the rank
    size: tuple[str, ...]  # variables with the number of ranks; the first that is set counts
    local_rank: str | None = None  # the variable with the rank on this host, if any
    local_size: str | None = None  # the variable with the number of ranks on this host, if any
    job: tuple[str, ...] = ()  # variables that are equal for the ranks of one start and differ between starts
    same_start: tuple[str, ...] = ()  # variables that, if set, also hold the rank
    how_to_set: str = "export NAME=VALUE"  # how to set a variable for all ranks
    kills_after_sigterm: bool = False  # it ends ranks by SIGTERM, and soon after by SIGKILL
    drops_last_output: bool = False  # after SIGINT or SIGTERM, it no longer shows what ranks print


SLURM = Launcher(
    name="srun (Slurm)",
    # Only set by srun. SLURM_PROCID and SLURM_NTASKS are also set in the batch script, which is no rank.
    signs=("SLURM_STEP_NODELIST",),
    rank="SLURM_PROCID",
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank="SLURM_LOCALID",
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    same_start=("PMI_RANK", "PMIX_RANK"),
    how_to_set="export NAME=VALUE before srun",
    kills_after_sigterm=True,
)

KUBERNETES = Launcher(
    name="Kubernetes (Indexed Job)",
    signs=("JOB_COMPLETION_INDEX",),
    rank="JOB_COMPLETION_INDEX",
    size=("WORLD_SIZE",),
    how_to_set="env: in the pod template",
)

LAUNCHERS: tuple[Launcher, ...] = (
    # MPI first: within a Slurm job, its launchers start a helper on each host by srun, whose variables remain set.
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
        kills_after_sigterm=True,
        drops_last_output=True,
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
    # PMIx passes the number of ranks to its clients only, not in the environment.
    Launcher(
        name="a launcher with PMIx",
        signs=("PMIX_RANK",),
        rank="PMIX_RANK",
        size=("WORLD_SIZE",),
        job=("PMIX_NAMESPACE",),
    ),
    KUBERNETES,
)
"""All of them; if the signs of several are set, the first counts."""


def find_launcher(environ: Environment) -> Launcher | None:
    """Return the launcher that started the process with this environment, None if no known one did."""
    for launcher in LAUNCHERS:
        if any(environ.get(sign) for sign in launcher.signs):
            return launcher
    return None
