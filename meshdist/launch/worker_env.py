"""The environment of a rank: a launcher sets it, and init_process_group reads it."""

from __future__ import annotations

import os
from typing import NamedTuple

from meshdist.bootstrap.spawned import NOT_SPAWNED
from meshdist.launch.worker import ERROR_FILE_VARIABLE
from meshdist.security.credentials import SECRET_FILE_VARIABLE, SECRET_VARIABLE, secret_from_environment
from meshdist.system.platform import available_cores, temporary_directory

LOOPBACK = "127.0.0.1"


def is_torchelastic_launched() -> bool:
    """Return True if a launcher (meshrun, spawn or torchrun) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Job(NamedTuple):
    """The data that all ranks of one start of a job share on this host."""

    run_id: str
    secret: str
    world_size: int  # the number of ranks, on all hosts
    master_addr: str
    master_port: int
    error_directory: str  # where the ranks of this host describe their failures
    first_rank: int = 0  # the first of the consecutive ranks of this host
    num_local: int | None = None  # number of ranks of this host; all if None
    node: int = 0  # the number of this host
    num_nodes: int = 1
    num_restarts: int = 0  # the number of starts before this one
    num_failed_starts: int = 0  # those that count as restarts; after the others, the hosts changed
    max_restarts: int = 0

    @property
    def local_ranks(self) -> range:
        num_local = self.world_size if self.num_local is None else self.num_local
        return range(self.first_rank, self.first_rank + num_local)

    def error_file(self, rank: int) -> str:
        return os.path.join(self.error_directory, f"rank{rank}.json")


def job_secret() -> str:
    """Return the secret given to this process, by variable or file, or a new random one."""
    return secret_from_environment().decode() or os.urandom(32).hex()


def new_job(world_size: int, secret: str, master_addr: str, master_port: int, run_id: str | None = None) -> Job:
    """Describe a new job whose store listens at `master_addr`:`master_port`.

    Its error directory has an unguessable name and does not exist until a rank fails.
    """
    run_id = run_id or os.urandom(8).hex()
    directory = os.path.join(temporary_directory(), f"meshdist-{os.urandom(16).hex()}")
    return Job(run_id, secret, world_size, master_addr, master_port, directory)


def worker_environment(job: Job, rank: int) -> dict[str, str]:
    size, restarts = str(job.world_size), str(job.num_restarts)
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(rank - job.first_rank),
        "LOCAL_WORLD_SIZE": str(len(job.local_ranks)),
        "GROUP_RANK": str(job.node),
        "GROUP_WORLD_SIZE": str(job.num_nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": str(job.master_port),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "RESTART_COUNT": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # The launcher's store: a script that sets MASTER_PORT itself uses another one.
        "MESHDIST_AGENT_STORE": f"{job.master_addr}:{job.master_port}",
        **NOT_SPAWNED,
        SECRET_VARIABLE: job.secret,
        ERROR_FILE_VARIABLE: job.error_file(rank),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, available_cores() // len(job.local_ranks)))
    if os.environ.get(SECRET_FILE_VARIABLE):
        variables[SECRET_FILE_VARIABLE] = ""  # the secret is passed already, and may differ from that of the file
    return variables
